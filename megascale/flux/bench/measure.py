"""One case: choose, check, time everything interleaved, check again.

What is timed in one run: cuBLAS alone (twice: their difference is the noise), the methods that are
not ours, and each of our forms in the configuration that the tuner found fastest for it; those
whose result may stay in symmetric memory ("_view") too, beside others that leave it there. What is
wrong or cannot run is named in the row and not timed; where that is a baseline every row needs, or
the choice itself, there is no row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megascale.flux.bench.targets import NOT_OURS, efficiency
from megascale.flux.bench.work import VIEW, Work
from megascale.flux.bench.world import World
from megascale.flux.forms import configs, on_request, views
from megascale.flux.symmetric.config import Sums
from megascale.flux.timing import Probe, Run, Timer, interleave, medians, slowest_rank
from megascale.flux.tuner import Candidate, Tuner, agreed
from megascale.flux.tuning_cache import Key
from megascale.flux.values import mismatch, tensors_of

FEWEST_ROUNDS, MOST_ROUNDS = 5, 15
ROUNDS_S = 0.5  # more rounds while a case has taken less
HOST_CALLS = 10
GEMM_ROWS = 512  # from here on our engine is timed alone


@dataclass
class Measured:
    """The numbers of a case. `forms` has every method's milliseconds, ours and others."""

    chosen: Candidate
    forms: dict[str, float]
    configs: dict[str, str]
    gemm_ms: float
    noise: float
    num_rounds: int
    spread: tuple[float, float]
    own_gemm_ms: float | None = None
    host_us: float | None = None
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return self.forms[self.chosen.name]

    @property
    def view_ms(self) -> float | None:
        """Of the fastest of ours whose result stays in symmetric memory."""
        ours = [ms for name, ms in self.forms.items() if name.endswith(VIEW)]
        return min([*ours, self.value]) if ours else None

    @property
    def baselines(self) -> dict[str, float]:
        others = {name: self.forms[name] for name in NOT_OURS if name in self.forms}
        return {"gemm": self.gemm_ms, **others}

    @property
    def efficiency(self) -> float | None:
        return efficiency(self.value, self.gemm_ms, self.forms["nccl"])

    @property
    def efficiency_own(self) -> float | None:
        """The fused kernel's, beside our own GEMM alone."""
        if self.own_gemm_ms is None or "fused" not in self.forms:
            return None
        exposed = self.forms["nccl"] - self.gemm_ms
        return 1 - (self.forms["fused"] - self.own_gemm_ms) / exposed if exposed > 0 else None


class CaseError(Exception):
    """A case has no row, and why."""


@dataclass(frozen=True)
class Offer:
    """Which of our forms are candidates: these names (none: all), and so many configurations."""

    forms: tuple[str, ...] = ()
    num_configs: int = 1_000


def measure(work: Work, world: World, tuner: Tuner, timer: Timer, offer: Offer) -> Measured:
    """The numbers of a case. Raises CaseError, on all ranks, where it can have no row."""
    candidates = _candidates(work, world, offer)
    asked = ",".join(name for name in on_request(work.case.op) if name in offer.forms)
    key = Key.of(work.problem, work.case.mode, device=world.device, asked=asked)
    chosen = tuner.choose(key, candidates)
    best = _best_of_each_form(candidates, tuner, key, chosen)
    excluded: dict[str, str] = {}
    check = Check(work, world, excluded)
    best = {name: c for name, c in best.items() if check(name, c.config, 0)}
    others = ["two_shot_in_place"] if "two_shot" in best else []
    viewed = _views(work, best)
    calls: dict[str, Run] = {"gemm": work.gemm(), "gemm_again": work.gemm()}
    calls |= {name: work.run(name, c.config) for name, c in best.items()}
    calls |= {name: work.run(name, None) for name in others if check(name, None, 0)}
    calls |= {name: work.run(name, c) for name, c in viewed.items() if check(name, c, 0)}
    own = _own_gemm(work, best)
    if own is not None:
        problem = _attempt(lambda: mismatch(tensors_of(own()), tensors_of(calls["gemm"]())))
        if agreed(f"{work.case}: own_gemm", problem, world.group):
            calls["own_gemm"] = own
    probes = _probes(calls, timer, world, excluded)
    _require(probes, chosen.name, excluded)
    samples = _rounds(probes, world)
    for name in sorted(probes.keys() & best.keys()):
        check(name, best[name].config, len(work.sets) - 1)
    ms = medians(samples, world.group)
    forms = {name: ms[name] for name in ms if name in calls and name not in excluded}
    for name in ("gemm", "gemm_again", "own_gemm"):
        forms.pop(name, None)
    _require(forms.keys() | {"gemm"}, chosen.name, excluded)
    return Measured(
        chosen=chosen,
        forms=forms,
        configs={name: c.label for name, c in best.items() if c.config is not None},
        gemm_ms=ms["gemm"],
        noise=abs(ms["gemm_again"] / ms["gemm"] - 1),
        num_rounds=len(samples["gemm"]),
        spread=(min(samples[chosen.name]), max(samples[chosen.name])),
        own_gemm_ms=ms.get("own_gemm"),
        host_us=_host_us(work, world, best),
        excluded=excluded,
    )


def _candidates(work: Work, world: World, offer: Offer) -> list[Candidate]:
    found = []
    for name in world.offered(work.case.op, offer.forms):
        if name in NOT_OURS or not offer.forms or name in offer.forms:
            every = configs(work.case.op, name, work.problem, world.capability)
            found += [
                Candidate(name, config, work.run(name, config))
                for config in every[: offer.num_configs]
            ]
    return found


def _best_of_each_form(
    candidates: list[Candidate], tuner: Tuner, key: Key, chosen: Candidate
) -> dict[str, Candidate]:
    """By form, the configuration that the tuner measured as fastest; else the form's default."""
    choice = tuner.known(key)
    ms = {} if choice is None else choice.ms
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        ahead = best.get(candidate.name)
        far = float("inf")
        if ahead is None or ms.get(candidate.label, far) < ms.get(ahead.label, far):
            best[candidate.name] = candidate
    return {**best, chosen.name: chosen}


def _views(work: Work, best: dict[str, Candidate]) -> dict[str, Any]:
    """Configurations of forms that leave their result in symmetric memory, by name: the best one's,
    and two hops, which then save a copy."""
    op = work.case.op
    found = {f"{name}{VIEW}": c.config for name, c in best.items() if views(op, name)}
    if f"plain{VIEW}" in found:
        found["plain_two_hops_view"] = Sums(shots=2)
    return found


class Check:
    """Whether a method's values agree with fp32; a reason why not goes into `excluded`."""

    def __init__(self, work: Work, world: World, excluded: dict[str, str]) -> None:
        self._work, self._world, self._excluded = work, world, excluded
        self._references: dict[int, torch.Tensor] = {}

    def __call__(self, name: str, config: Any, number: int) -> bool:
        """All ranks together. Memory that the method should write holds NaN when it starts."""
        if number not in self._references:
            self._references = {number: self._work.reference(number)}
        wanted = self._references[number]
        self._world.poison()
        dtype, device = self._work.problem.dtype, self._world.device
        stale = torch.full(wanted.shape, torch.nan, dtype=dtype, device=device)
        del stale  # the output is allocated where it was
        problem = _attempt(
            lambda: mismatch(
                tensors_of(self._work.call(name, config, number)),
                [wanted],
                dtype,
            )
        )
        if agreed(f"{self._work.case}: {name}", problem, self._world.group):
            return True
        self._world.reset()
        self._excluded[name] = problem or "wrong on another rank"
        return False


def _attempt(what: Callable[[], str]) -> str:
    """The problem that `what` finds, or its failure."""
    try:
        return what()
    except Exception as error:  # noqa: BLE001 - a method is tried: its failure is its result
        return f"fails: {type(error).__name__}: {error}"


def _probes(
    calls: dict[str, Run], timer: Timer, world: World, excluded: dict[str, str]
) -> dict[str, Probe]:
    probes: dict[str, Probe] = {}

    def prepare(name: str, run: Run) -> str:
        probes[name] = timer.prepare(run)
        return ""

    for name, run in calls.items():
        problem = _attempt(lambda name=name, run=run: prepare(name, run))  # type: ignore[misc]
        if not agreed(name, problem, world.group):
            probes.pop(name, None)
            world.reset()
            excluded[name] = problem or "fails on another rank"
    return probes


def _require(names: Any, chosen: str, excluded: dict[str, str]) -> None:
    for name in ("gemm", "nccl", chosen):
        if name not in names:
            raise CaseError(f"{name} is excluded ({excluded.get(name, 'it was not timed')})")


def _rounds(probes: dict[str, Probe], world: World) -> dict[str, list[float]]:
    """At least five rounds; more where they are quick. As many on every rank."""
    start = time.monotonic()
    samples = interleave(probes, FEWEST_ROUNDS)
    took = slowest_rank({"s": time.monotonic() - start}, world.group)["s"]
    affordable = int((ROUNDS_S - took) / (took / FEWEST_ROUNDS))
    extra = max(0, min(MOST_ROUNDS - FEWEST_ROUNDS, affordable))
    for name, times in interleave(probes, extra).items():
        samples[name] += times
    return samples


def _own_gemm(work: Work, best: dict[str, Candidate]) -> Run | None:
    fused = best.get("fused")
    if fused is None or work.problem.m < GEMM_ROWS or work.case.mode == "graph":
        return None
    return work.own_gemm(fused.config)


def _host_us(work: Work, world: World, best: dict[str, Candidate]) -> float | None:
    """Microseconds that the host needs to start an eager fused call; the slowest rank's median."""
    name = "fused" if "fused" in best else "few_rows"
    if name not in best or work.case.mode == "graph" or not world.on_cuda:
        return None
    run = work.run(name, best[name].config)
    times = []
    for _ in range(5):
        world.quiesce()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            run()
        times.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
    return slowest_rank({"us": statistics.median(times)}, world.group)["us"]
