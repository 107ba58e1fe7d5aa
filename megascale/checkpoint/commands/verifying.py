"""`megascale checkpoint verify`: every byte of a checkpoint is read and held to its hash.

All cores hash, each block once. All that is wrong is told, not the first alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from megascale.checkpoint.full import FullReader
from megascale.checkpoint.manifest import read_manifest
from megascale.checkpoint.places import Location, opened
from megascale.errors import CheckpointError
from megascale.storage import check_file

_LEAST_THREADS = 4  # where cores are few, reading still wants several at once


@dataclass(frozen=True)
class Verdict:
    """num_bytes  that were read; problems  empty: it is good"""

    path: str
    step: int | None
    num_bytes: int
    seconds: float
    problems: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return not self.problems

    def line(self) -> str:
        if not self.is_good:
            return "\n".join(f"{self.path}: NOT GOOD: {problem}" for problem in self.problems)
        rate = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        return (
            f"{self.path}: good, {self.num_bytes:,} bytes in {self.seconds:.1f} s ({rate:.2f} GB/s)"
        )


def verify_all(
    places: list[Location], told: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """Each is `told` when it is done."""
    verdicts = []
    for place in places:
        verdicts.append(_verify(place))
        told(verdicts[-1])
    return verdicts


def _verify(place: Location) -> Verdict:
    since_s = time.monotonic()
    num_bytes = 0

    def count(moved_bytes: int) -> None:
        nonlocal num_bytes
        num_bytes += moved_bytes

    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        return Verdict(str(place), None, 0, time.monotonic() - since_s, (str(error),))
    storage, folder = opened(place)
    problems = []
    num_threads = max(_LEAST_THREADS, len(os.sched_getaffinity(0)))
    for name, saved in manifest.files.items():
        try:
            check_file(
                storage,
                f"{folder}/{name}",
                saved.num_bytes,
                saved.header_bytes,
                saved.header_sha256,
                saved.blocks,
                num_threads=num_threads,
                moved=count,
            )
        except CheckpointError as error:
            problems.append(str(error))
    if not problems:
        problems += _problems_of_contents(place)
    return Verdict(
        str(place), manifest.step, num_bytes, time.monotonic() - since_s, tuple(problems)
    )


def _problems_of_contents(place: Location) -> list[str]:
    """Bytes that are as written may still not say what lies where."""
    try:
        FullReader(place, verified=True).keys()
    except CheckpointError as error:
        return [str(error)]
    return []
