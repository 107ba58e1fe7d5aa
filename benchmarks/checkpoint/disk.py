"""Writing and reading a file of state, against a raw write and read of the same bytes.

    python -m benchmarks.checkpoint.disk [--folder DIR] [--gb G] [--rounds N] [--output ROWS]

Ours: `FileWriter` from shared memory, hashed on the way, until file and names are durable; and
`check_file`, which reads all blocks and holds each to its hash, as a load does. Raw, both of it
plain Python in one thread: O_DIRECT in 16 MiB pieces, and through the page cache with fsync (reads:
after the file was dropped from the cache). The better raw one counts. A round is all six, the raw
ones around ours; the value is the median over the rounds of ours against the better raw one of the
same round, as a disk of a shared machine is not the same from minute to minute.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from megascale.storage import BLOCK_BYTES, FileJob, FileWriter, Written, check_file, open_storage
from megascale.train.bench.rows import Origin

SHARE = 0.8
HEADER_BYTES = 4096
Rates = dict[str, list[float]]


def measure(folder: Path, num_bytes: int, rounds: int) -> tuple[Rates, Rates]:
    """Bytes per second of writes and of reads, by what did them."""
    descriptor, slot = _slot(num_bytes)
    writes: Rates = {"direct": [], "ours": [], "cached": []}
    reads: Rates = {"direct": [], "ours": [], "cached": []}
    job = FileJob(
        str(folder),
        "ours",
        b" " * HEADER_BYTES,
        f"/proc/{os.getpid()}/fd/{descriptor}",
        0,
        num_bytes,
    )
    raw = folder / "raw"
    try:
        with FileWriter() as writer:
            for number in range(rounds + 1):
                written: list[Written] = []
                steps: dict[str, Callable[[], object]] = {
                    "direct": partial(_write_raw, raw, slot, os.O_DIRECT),
                    "ours": lambda kept=written: kept.append(writer.write(job)),  # type: ignore[misc]
                    "cached": partial(_write_raw, raw, slot, 0),
                }
                _time(steps, writes, num_bytes, is_warm=number > 0)
                steps = {
                    "direct": partial(_read_raw, raw, num_bytes, os.O_DIRECT),
                    "ours": partial(_check, folder, written[0]),
                    "cached": partial(_read_raw, raw, num_bytes, 0),
                }
                _time(steps, reads, num_bytes, is_warm=number > 0)
    finally:
        os.close(descriptor)
    return writes, reads


def _slot(num_bytes: int) -> tuple[int, memoryview]:
    """Shared memory of this process, as a trainer's: bytes that no disk can compress."""
    descriptor = os.memfd_create("slot")
    os.truncate(descriptor, num_bytes)
    view = memoryview(mmap.mmap(descriptor, num_bytes))
    for start in range(0, num_bytes, BLOCK_BYTES):
        view[start : start + BLOCK_BYTES] = os.urandom(BLOCK_BYTES)
    return descriptor, view


def _time(
    steps: Mapping[str, Callable[[], object]], rates: Rates, num_bytes: int, *, is_warm: bool
) -> None:
    for name, step in steps.items():
        since_s = time.monotonic()
        step()
        if is_warm:
            rates[name].append(num_bytes / (time.monotonic() - since_s))


def _write_raw(path: Path, values: memoryview, flag: int) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flag)
    try:
        for start in range(0, values.nbytes, BLOCK_BYTES):
            assert os.write(descriptor, values[start : start + BLOCK_BYTES]) == BLOCK_BYTES
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_raw(path: Path, num_bytes: int, flag: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        if not flag:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            for start in range(0, num_bytes, BLOCK_BYTES):
                assert os.preadv(descriptor, [buffer], start) == BLOCK_BYTES
    finally:
        os.close(descriptor)


def _check(folder: Path, written: Written) -> None:
    check_file(
        open_storage(folder),
        "ours",
        written.num_bytes,
        HEADER_BYTES,
        written.header_sha256,
        written.blocks,
    )


def line(name: str, rates: Rates, num_bytes: int) -> Line:
    shares = [
        ours / max(direct, cached)
        for ours, direct, cached in zip(
            *(rates[k] for k in ("ours", "direct", "cached")), strict=True
        )
    ]
    more = {f"{kind}_gb_s": statistics.median(found) / 1e9 for kind, found in rates.items()}
    more |= {"bytes": num_bytes, "rounds": len(shares), "least": min(shares), "most": max(shares)}
    case = {"line": name, "ranks": 1}
    return Line(case, "share of raw", statistics.median(shares), (">=", SHARE), more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    num_bytes = max(1, int(given.gb * 1e9) // BLOCK_BYTES) * BLOCK_BYTES
    if given.folder is not None:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="megascale-bench-", dir=given.folder))
    try:
        writes, reads = measure(folder, num_bytes, given.rounds)
    finally:
        shutil.rmtree(folder)
    origin = Origin.here(
        num_ranks=1,
        on_gpus=False,
        command=f"python -m benchmarks.checkpoint.disk --gb {given.gb:g} --rounds {given.rounds}",
        given_commit=given.commit or None,
    )
    lines = [line("disk-write", writes, num_bytes), line("disk-read", reads, num_bytes)]
    for one in lines:
        print(dict(one.more))
    write_rows(lines, origin, given.output)


if __name__ == "__main__":
    main()
