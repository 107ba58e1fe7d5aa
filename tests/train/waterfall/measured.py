"""Runs on gloo ranks with every operator marked, and with delays where a test wants them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale.config import load_config
from megascale.events import Event, run_header
from megascale.flux import collectives
from megascale.model.attention import Attention
from megascale.model.layers import FusedLinear, Norm
from megascale.parallel.transfers import Receive
from megascale.telemetry.clock import MonotonicClock
from megascale.telemetry.recorder import Recorder
from megascale.train.assemble import Assembly, assemble
from megascale.train.corpus import make_loader
from megascale.train.step import train_step
from megascale.train.waterfall.alone import alone_ns
from megascale.train.waterfall.probe import Probe, attach

SMALL = [
    *("model.hidden_size=32", "model.num_layers=4", "model.num_heads=4", "model.vocab_size=64"),
    *("model.ffn_hidden_size=64", "training.seq_len=16", "training.global_batch_size=4"),
    *("data.synthetic=true", "parallelism.bucket_mb=0.01", "training.device=cpu"),
]


class QuietClock(MonotonicClock):
    """The host's clock of a machine on which nothing takes time but delays, and 1 us a mark: what
    else a busy machine does meanwhile would hide them."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    def mark(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


class Delay:
    """Sleeps, or lets a quiet clock go on; remembers how long in each step."""

    def __init__(self, seconds: float, clock: MonotonicClock) -> None:
        self.seconds, self.slept_ns, self._clock = seconds, 0, clock

    def __call__(self) -> None:
        begin = time.monotonic_ns()
        if isinstance(self._clock, QuietClock):
            self._clock.now_ns += round(self.seconds * 1e9)
            self.slept_ns += round(self.seconds * 1e9)
            return
        time.sleep(self.seconds)
        self.slept_ns += time.monotonic_ns() - begin

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            self()
            return call(*args, **kwargs)

        return delayed


@dataclass(frozen=True)
class Measured:
    """One rank's events, and how long it was made to sleep in the steps after the first."""

    events: list[Event]
    slept_ns: list[int]
    losses: list[float]


def run_marked(
    rank: int,
    world_size: int,
    settings: Sequence[str],
    delayed: str | None,
    seconds: float,
    num_steps: int,
    marks: bool,
    quiet: bool,
) -> Measured:
    """Train `num_steps`; `delayed` is the class of work that is delayed, on rank 0 for "bubble".

    quiet  by a clock on which only the delays take time
    """
    config = load_config(None, [*SMALL, *settings])
    mesh = config.mesh(world_size)
    events: list[Event] = [run_header(mesh, rank, host="here", device="cpu")]
    clock = QuietClock() if quiet else MonotonicClock()
    recorder = Recorder(clock, events.append, rank=rank, span_interval=1)
    recorder._host_clock = clock  # of waiting for data
    probe = Probe(recorder)
    span = probe.span if marks else recorder.span
    assembly = assemble(config, mesh, torch.device("cpu"), span=span, detail=span)
    delay = Delay(seconds, clock)
    if delayed is not None:
        _delay(delay, delayed, assembly, rank)
    if marks:
        recorder.incident("waterfall", gemm_flops=attach(probe, assembly))
    loader = make_loader(config, mesh, assembly.groups.coordinates, 0)
    slept, losses = [], []
    for number in range(1, num_steps + 1):
        before = delay.slept_ns
        with recorder.step(number):
            with recorder.span("data_wait", host=True):
                batch = next(loader)
                if delayed == "host":
                    delay()
            outcome = train_step(
                assembly, batch.micro_batches, global_batch=batch.num_samples, lr=1e-3
            )
        losses.append(outcome.summary.read()[0])
        slept.append(delay.slept_ns - before)
    if marks:
        detail: dict[str, Any] = alone_ns(probe, assembly, turns=5, timer=clock.mark)
        recorder.incident("alone", operators=detail)
    loader.close()
    recorder.close()
    return Measured(events, slept, losses)


# Which attribute of which modules is a class of work.
_ON_MODULES: dict[str, tuple[type, str]] = {
    "gemm": (FusedLinear, "op"),
    "bubble": (FusedLinear, "op"),
    "attention": (Attention, "core"),
    "elementwise": (Norm, "forward"),
}


def _delay(delay: Delay, work: str, assembly: Assembly, rank: int) -> None:
    """Put `delay` into everything of a class; before the probe brackets it."""
    targets: list[tuple[Any, str]] = []
    if work in _ON_MODULES and (work != "bubble" or rank == 0):
        kind, name = _ON_MODULES[work]
        modules = [m for chunk in assembly.chunks.values() for m in chunk.modules()]
        targets = [(module, name) for module in modules if isinstance(module, kind)]
    elif work == "optimizer":
        targets = [(assembly.optimizer, "step")]
    elif work in ("tp", "dp"):
        targets = [(collectives, "_gather_single")]
    elif work == "pp":
        receive: Any = Receive
        receive.wait = _behind(delay, Receive.wait)
    for target, name in targets:
        setattr(target, name, delay.before(getattr(target, name)))


def _behind(delay: Delay, wait: Callable[[Receive], torch.Tensor]) -> Callable[[Receive], Any]:
    """A value that has come is late."""

    def delayed(receive: Receive) -> torch.Tensor:
        value = wait(receive)
        delay()
        return value

    return delayed
