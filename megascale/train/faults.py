"""Faults that a trainer has on purpose, while it runs: for `megascale chaos` and tests.

Attached only where MEGASCALE_FAULT names a file of orders (`rank.py`); without it nothing here is
imported. The file is a JSON list, replaced whole by whoever orders, and looked at (one `stat`) when
a step starts:

    [{"id": "3", "kind": "segv", "ranks": [1], "step": 17, "times": 1, "seconds": 0.1}]

    ranks  that have the fault        step   when this step starts; null: at the next one
    times  how often, over epochs; the other keys are the fault's own (`_DEFAULTS`)

Before the fault the rank writes `done/ID-RANK-N.json` beside the orders: the moment on the
monotonic clock, step and epoch. What has its file is not done again, so a restarted rank has a
fault again only where `times` says so.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.telemetry.hooks import Hook
from megascale.train.assemble import Assembly
from megascale.train.left_out import leave_out
from megascale.train.pace import Pace, pace_file

FOR_EVER_S = 36_000.0
_USUAL_STEPS = 16  # a step's usual time is the median of so many
_CYCLES = 10_000_000  # of the device's clock, to learn how long they take: about 5 ms
_DEFAULTS: dict[str, Any] = {
    "seconds": 0.1,  # slow: of each micro-batch; clock: how far it is put forward; kill_in_save
    "share": 0.0,  # slow: of a step's time so far, instead of seconds; 0: seconds count
    "steps": 1,  # slow, spike, leak, garbage: how many
    "scale": 8.0,  # spike: what the chunk's output is multiplied by
    "megabytes": 256,  # memory that is touched, or left free before it is; leak: in each step
    "objects": 1_000_000,  # garbage: that a collection walks through
    "lines": 20_000,  # log_storm
    "code": 17,  # exit
    "group": 0,  # skip_collective: of the world; 1: tensor, 2: data, 3: a send of the pipeline
}


def ordered(orders: str, assembly: Assembly, global_rank: int, epoch: int) -> list[Hook]:
    """The hooks of a rank that somebody tests: its faults, and its pace where there is one."""
    table = pace_file(orders)
    pace = [Pace(table, assembly, global_rank)] if table.exists() else []
    return [Faults(orders, assembly, global_rank, epoch), *pace]


class Faults(Hook):
    """Of one rank of one epoch."""

    def __init__(
        self, orders: str | Path, assembly: Assembly, global_rank: int, epoch: int
    ) -> None:
        self._file = Path(orders)
        self._assembly, self._rank, self._epoch = assembly, global_rank, epoch
        self._stamp: tuple[int, int] | None = None
        self._orders: list[dict[str, Any]] = []
        self._at_end: list[dict[str, Any]] = []
        self._step = 0
        self._began_s: deque[float] = deque(maxlen=_USUAL_STEPS + 1)

    def on_step_start(self, step: int) -> None:
        self._began_s.append(time.monotonic())
        self._look()
        self._step = step
        for order in list(self._orders):
            wanted = order.get("step")
            if wanted is not None and step < wanted:
                continue
            if wanted is not None and step > wanted:
                continue  # of an epoch that resumes before it, perhaps
            if order["kind"] in _AT_END:
                self._at_end.append(order)
                self._orders.remove(order)
            elif self._is_first(order, step):
                self._orders.remove(order)
                _KINDS[order["kind"]](self, {**_DEFAULTS, **order}, step)

    def on_step_end(self, step: int) -> None:
        for order in list(self._at_end):
            interval = _AT_END[order["kind"]](self._assembly)
            if interval and step % interval == 0 and self._is_first(order, step):
                self._at_end.remove(order)
                _KINDS[order["kind"]](self, {**_DEFAULTS, **order}, step)

    # ------------------------------------------------------------ orders

    def _look(self) -> None:
        try:
            status = os.stat(self._file)
        except FileNotFoundError:
            return
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        known = {order["id"] for order in self._at_end}
        self._orders = [
            order
            for order in json.loads(self._file.read_text())
            if self._rank in order["ranks"]
            and order["id"] not in known
            and self._times(order) < order.get("times", 1)
        ]

    def _marker(self, order: dict[str, Any], number: int) -> Path:
        return self._file.parent / "done" / f"{order['id']}-{self._rank}-{number}.json"

    def _times(self, order: dict[str, Any]) -> int:
        number = 0
        while self._marker(order, number).exists():
            number += 1
        return number

    def _is_first(self, order: dict[str, Any], step: int) -> bool:
        """Say that it happens now. False where it has happened as often as was ordered."""
        number = self._times(order)
        if number >= order.get("times", 1):
            self._orders = [one for one in self._orders if one is not order]
            return False
        entry = {"monotonic_ns": time.monotonic_ns(), "step": step, "epoch": self._epoch}
        marker = self._marker(order, number)
        marker.parent.mkdir(exist_ok=True)
        new = marker.with_suffix(".new")
        new.write_text(json.dumps({**entry, "pid": os.getpid()}))
        new.replace(marker)
        return True

    # ------------------------------------------------------------ faults

    def segv(self, _order: dict[str, Any], _step: int) -> None:
        ctypes.string_at(0)

    def abort(self, _order: dict[str, Any], _step: int) -> None:
        os.abort()

    def exit(self, order: dict[str, Any], _step: int) -> None:
        os._exit(int(order["code"]))

    def exception(self, _order: dict[str, Any], step: int) -> None:
        raise ValueError(f"ordered: a mistake of the program at step {step}")

    def sleep(self, _order: dict[str, Any], _step: int) -> None:
        time.sleep(FOR_EVER_S)

    def gil(self, _order: dict[str, Any], _step: int) -> None:
        """Sleep in C with the interpreter's lock held: no thread of this process runs."""
        while True:  # a signal ends the sleep
            ctypes.PyDLL(None).sleep(int(FOR_EVER_S))

    def skip_collective(self, order: dict[str, Any], _step: int) -> None:
        leave_out(self._assembly.groups, int(order["group"]))

    def slow(self, order: dict[str, Any], step: int) -> None:
        last, seconds = step + int(order["steps"]), float(order["seconds"])
        if order["share"]:
            training, num_data = self._assembly.config.training, self._assembly.mesh.data
            num_passes = training.global_batch_size // (training.micro_batch_size * num_data)
            usual_s = statistics.median(b - a for a, b in pairwise(self._began_s))
            seconds = float(order["share"]) * usual_s / num_passes
        pause = self._pause(seconds)

        def wait(_module: object, _inputs: object) -> None:
            if self._step < last:
                pause()

        self._chunk().register_forward_pre_hook(wait)

    def _pause(self, seconds: float) -> Callable[[], None]:
        """What makes a computation so much later; on a GPU it is the device that waits."""
        if self._assembly.device.type != "cuda":
            return lambda: time.sleep(seconds)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(_CYCLES)
        end.record()
        end.synchronize()
        cycles = int(_CYCLES * seconds * 1e3 / begin.elapsed_time(end))
        return lambda: torch.cuda._sleep(cycles)

    def nan(self, _order: dict[str, Any], _step: int) -> None:
        """The gradient of this rank's chunk is not a number, once."""

        def hook(_module: object, _inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                handle.remove()
                output.register_hook(lambda grad: grad * float("nan"))

        handle = self._chunk().register_forward_hook(hook)

    def spike(self, order: dict[str, Any], step: int) -> None:
        """The output of this rank's chunk is too large for some steps, and so is the loss."""
        self._last_spike = step + int(order["steps"])
        scale = float(order["scale"])

        def hook(_module: object, _inputs: object, output: Tensor) -> Tensor | None:
            return output * scale if self._step < self._last_spike else None

        self._chunk().register_forward_hook(hook)

    def flip(self, _order: dict[str, Any], _step: int) -> None:
        """One bit of one parameter of this replica, where the next comparison sees it."""
        zero = self._assembly.zero
        zero.wait_for_parameters()
        flat = zero.buckets[0].parameters
        words = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[flat.element_size()])
        words[words.numel() // 3] ^= 1 << 10

    def out_of_memory(self, order: dict[str, Any], _step: int) -> None:
        """The address space is limited, then asked for more."""
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = own + (int(order["megabytes"]) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        torch.empty(limit, dtype=torch.uint8)

    def touch(self, order: dict[str, Any], _step: int) -> None:
        """Use memory; whoever ordered it has limited this process's cgroup before."""
        self.held = torch.ones(int(order["megabytes"]) << 20, dtype=torch.uint8)

    def leak(self, order: dict[str, Any], step: int) -> None:
        """Every step of some holds memory that the one before did not."""
        leaked: list[Tensor] = []
        last, num_bytes = step + int(order["steps"]), int(order["megabytes"]) << 20

        def hold(_module: object, _inputs: object) -> None:
            if self._step < last and len(leaked) <= self._step - step:
                device = self._assembly.device
                leaked.append(torch.ones(num_bytes, dtype=torch.uint8, device=device))

        self._chunk().register_forward_pre_hook(hold)

    def garbage(self, order: dict[str, Any], step: int) -> None:
        """Python collects garbage among many objects, in the middle of each step of some."""
        last = step + int(order["steps"])
        held = [[number] for number in range(int(order["objects"]))]

        def collect(_module: object, _inputs: object) -> None:
            if self._step < last and held:
                gc.collect()

        self._chunk().register_forward_pre_hook(collect)

    def disk_full(self, _order: dict[str, Any], _step: int) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"no room for this")

    def kill_in_save(self, order: dict[str, Any], _step: int) -> None:
        """End by SIGKILL soon after a checkpoint was begun."""
        timer = threading.Timer(float(order["seconds"]), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()

    def log_storm(self, order: dict[str, Any], step: int) -> None:
        for number in range(int(order["lines"])):
            print(f"step {step}: {number} of many lines, NCCL INFO retry worked, 0 ECC errors")
        sys.stdout.flush()

    def clock(self, order: dict[str, Any], _step: int) -> None:
        """This process's wall clock is put forward."""
        real, real_ns, offset_s = time.time, time.time_ns, float(order["seconds"])
        time.time = lambda: real() + offset_s
        time.time_ns = lambda: real_ns() + int(offset_s * 1e9)

    # ------------------------------------------------------------ where they attack

    def _chunk(self) -> torch.nn.Module:
        return next(iter(self._assembly.chunks.values()))


_KINDS: dict[str, Callable[[Faults, dict[str, Any], int], None]] = {
    name: getattr(Faults, name)
    for name in (
        *("segv", "abort", "exit", "exception", "sleep", "gil", "skip_collective", "slow", "nan"),
        *(
            "spike",
            "flip",
            "out_of_memory",
            "touch",
            "leak",
            "disk_full",
            "kill_in_save",
            "log_storm",
        ),
        *("clock", "garbage"),
    )
}
# Those that wait for the end of a step behind which something else happens: every how many steps.
_AT_END: dict[str, Callable[[Assembly], int]] = {
    "flip": lambda assembly: assembly.config.debug.check_replicas_interval,
    "kill_in_save": lambda assembly: assembly.config.checkpoint.interval,
}
