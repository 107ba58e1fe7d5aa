"""Stacks of a hung job's processes: who waits, and which stacks are alike (ByteRobust 5).

A rank that waits for others stands in a collective, a transfer or a wait for the device; a rank
that holds the others up stands somewhere else. Read from the text of `py-spy dump`, which needs
neither the GIL nor a signal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

Stand = Literal["busy", "transfer", "tensor", "data", "world", "other"]
"""In no wait, in a wait for a pipeline's neighbour, for a group, or for something else."""

WAITS = frozenset(
    {
        *("wait", "_wait", "synchronize", "barrier", "monitored_barrier", "wait_for_device"),
        *("send", "recv", "finish"),
    }
)
"""Functions that stand on top of a stack while their rank waits for others or for the device."""

POSTS = frozenset({"isend", "irecv", "batch_isend_irecv"})
"""Functions that should return at once; a rank may stand there for either reason."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather")
_WAITING_FILES = ("torch/distributed/", "torch/cuda/streams")
_WAITS_OF: tuple[tuple[str, Stand], ...] = (  # the innermost frame of such a file tells
    ("parallel/transfers", "transfer"),
    ("parallel/step_store", "transfer"),
    ("parallel/pipeline", "transfer"),
    ("parallel/gradients", "data"),
    ("parallel/gathering", "data"),
    ("parallel/reduce_scatter", "data"),
    ("._sum_replicated", "tensor"),
    ("flux/all_gather", "tensor"),
    ("flux/gemm_", "tensor"),
    ("parallel/vocabulary", "tensor"),
    ("parallel/cross_entropy", "tensor"),
    ("train/step", "world"),
)
_BACKWARD = "_engine_run_backward"
_FRAME = re.compile(r"^\s+(?P<function>.+?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)\s*$")
_THREAD = re.compile(r'^Thread .*?(?:"(?P<name>[^"]*)")?\s*$')


def main_frames(dump: str) -> tuple[str, ...]:
    """The frames of the thread that trains, innermost first, as `function (file)`.

    That is the main thread; where it waits for autograd, the thread that runs Python's part of the
    backward pass, if there is one. Empty where the dump has no frames.
    """
    threads = _threads(dump)
    if not threads:
        return ()
    main = next((frames for name, frames in threads if name == "MainThread"), threads[0][1])
    if main and _function(main[0]) == _BACKWARD:
        for _, frames in threads:
            if frames is not main and any(_function(frame) == "backward" for frame in frames):
                return frames
    return main


def stand(frames: Sequence[str]) -> Stand | None:
    """What a rank with these frames does; None where its stack does not say.

    The engine of autograd is C++: what a thread of it does shows in no Python frame.
    """
    if not frames or _function(frames[0]) == _BACKWARD:
        return None
    function = _function(frames[0])
    if function in POSTS:
        return None
    waits = function in WAITS or any(place in frames[0] for place in _WAITING_FILES)
    if not waits and not any(function.startswith((name, f"_{name}")) for name in COLLECTIVES):
        return "busy"
    for frame in frames[:4]:
        for file, of in _WAITS_OF:
            if file in frame:
                return of
    return "other"


def clusters(stacks: Mapping[int, Sequence[str]]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Equal stacks (functions and files, no line numbers) and their ranks; the commonest first."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, frames in sorted(stacks.items()):
        alike.setdefault(tuple(frames), []).append(rank)
    found = [(frames, tuple(ranks)) for frames, ranks in alike.items()]
    return sorted(found, key=lambda entry: (-len(entry[1]), entry[1]))


def _threads(dump: str) -> list[tuple[str, tuple[str, ...]]]:
    """Threads of a dump by name; text without a thread's head is one thread without a name."""
    threads: list[tuple[str, list[str]]] = []
    for line in dump.splitlines():
        head = _THREAD.match(line)
        if head:
            threads.append((head["name"] or "", []))
            continue
        frame = _FRAME.match(line)
        if frame is None:
            continue
        if not threads:
            threads.append(("", []))
        threads[-1][1].append(f"{frame['function']} ({frame['file']})")
    return [(name, tuple(frames)) for name, frames in threads if frames]


def _function(frame: str) -> str:
    """The function's own name: `wait` of `Pending.wait (megascale/flux/collectives.py)`."""
    return frame.rsplit(" (", 1)[0].rsplit(".", 1)[-1]
