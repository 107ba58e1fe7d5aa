"""The loader of a node, as a process: `python -m megascale.data.node.process` (MegaScale 3.4).

Standard input brings a line of JSON that says what to do, then a line for each position to read
from; when it ends, or when who started this dies, the loader ends. Signals that ask a run to stop
are for the ranks: they may need more batches until they have saved.

    {"config": RunConfig, "memory": FD, "parent": PID, "rings": [{"split": "train", "shape": ...}]}
    {"ring": 0, "generation": 1, "first_sample": 0}

An error of a sample is told to the ranks with its batch (`filling.py`); any other is the loader's
end, and its last words are left in every ring.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

from megascale.config import RunConfig
from megascale.data.mixture import SampleOrder
from megascale.data.node.filling import (
    Filler,
    Positions,
    training_positions,
    validation_positions,
)
from megascale.data.node.ring import ALL, Ring
from megascale.data.node.shape import RingShape, offsets
from megascale.data.node.waiting import FIRST_S, MOST_S
from megascale.data.opening import held_out_batches, open_held_out, open_order
from megascale.data.prepared import Split
from megascale.errors import MegascaleError

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Orders:
    """Lines of a pipe, without waiting for them."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._left = b""
        self.has_ended = False

    def take(self, timeout_s: float) -> dict[str, Any] | None:
        """The next line, if it comes within the time."""
        if b"\n" not in self._left and not self.has_ended:
            if not select.select([self._pipe], [], [], timeout_s)[0]:
                return None
            read = os.read(self._pipe, 1 << 20)
            self.has_ended = not read
            self._left += read
        line, found, left = self._left.partition(b"\n")
        if not found:
            return None
        self._left = left
        order: dict[str, Any] = json.loads(line)
        return order

    def first(self) -> dict[str, Any] | None:
        """The first line; None where the pipe ends before."""
        order = None
        while order is None and not self.has_ended:
            order = self.take(3600.0)
        return order


def main() -> None:
    """Until standard input ends."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    orders = Orders(sys.stdin.fileno())
    job = orders.first()
    if job is None or not _die_with(job["parent"]):
        return
    shapes = [RingShape.from_json(ring["shape"]) for ring in job["rings"]]
    memory = memoryview(mmap.mmap(job["memory"], 0))
    starts = offsets(shapes)
    rings = [Ring(memory[at:], shape) for at, shape in zip(starts, shapes, strict=False)]
    try:
        config = RunConfig.model_validate(job["config"])
        splits = [ring["split"] for ring in job["rings"]]
        fillers = [
            Filler(ring, open_parts_of(config, split))
            for ring, split in zip(rings, splits, strict=True)
        ]
        serve(fillers, orders, config)
    except BaseException as error:
        told = str(error) if isinstance(error, MegascaleError) else repr(error)
        code = error.exit_code if isinstance(error, MegascaleError) else 1
        for ring in rings:
            ring.fail(ALL, told, code)
        raise


def serve(fillers: Sequence[Filler], orders: Orders, config: RunConfig) -> None:
    """Fill the rings, the first one first, a sample at a time; ring 1 is of validation."""
    pause_s = 0.0
    while not orders.has_ended:
        if (order := orders.take(pause_s)) is not None:
            fillers[order["ring"]].begin(order["generation"], positions(config, **order))
        if any(filler.advance() for filler in fillers):
            pause_s = 0.0
        else:
            pause_s = min(max(2 * pause_s, FIRST_S), MOST_S)


def positions(config: RunConfig, *, ring: int, generation: int, first_sample: int) -> Positions:
    """Batch after batch of one ring."""
    assert generation > 0, generation
    training = config.training
    if ring == 0:
        return training_positions(training.global_batch_at, first_sample)
    return validation_positions(held_out_batches(config), training.global_batch_size)


def open_parts_of(config: RunConfig, split: Split) -> list[SampleOrder]:
    """What a ring is read from: the order of training, or what is held out, part by part."""
    return [open_order(config, "train")] if split == "train" else open_held_out(config)


def _die_with(parent: int) -> bool:
    """Ask the kernel to end this process with the one that started it; False: it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    main()
