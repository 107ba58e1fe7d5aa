"""The form for a shape class: of those that the settings allow, by what was measured, else by rule.

What is measured, or read from a file, belongs to a group and is shared by its operators. Settings
that leave forms out measure nothing themselves: they take the fastest of what is left where the
class was measured with all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megascale.errors import FluxError
from megascale.flux.arena import Arena
from megascale.flux.call import Bound, Call
from megascale.flux.default_rule import Mode, default_form
from megascale.flux.forms import configs, forms, missing, on_request, views
from megascale.flux.gemm_config import capability_of
from megascale.flux.gemm_reduce_scatter import pair
from megascale.flux.problem import Problem
from megascale.flux.settings import Settings
from megascale.flux.timing import EagerTimer, HostTimer
from megascale.flux.tuner import REFERENCE, Candidate, Tuner
from megascale.flux.tuning_cache import Key, TuningCache, m_class

SHIPPED = Path(__file__).with_name("tuned.json")

_FUSED = ("few_rows", "fused")
_FUSED_IN_FLIGHT = ("few_rows", "in_flight")
_WITHOUT_SPINNING = ("nccl", "chunked")  # nothing that fills the GPU waits in them
_RESERVING = ("nccl", "few_rows", "fused", "chunked")  # or only on `arena.num_sms` SMs


def choose(problem: Problem, call: Call, arena: Arena, settings: Settings, when: Mode) -> Bound:
    """The form, bound to `arena`. Collective at the group's first, and where it measures."""
    cache, tuner = _tuner_of(arena, settings.cache)
    allowed = _allowed(settings)
    key = _class_of(problem, arena, settings, allowed, when, cache)
    unasked = set(on_request(call.op)) - set(settings.asked)
    offered = {
        candidate.label: (candidate, bound)
        for name in allowed or forms(call.op)
        if name not in unasked and name not in missing(call.op)
        for candidate, bound in _candidates(name, problem, call, arena, view=settings.view)
    }
    candidates = [candidate for candidate, _ in offered.values()]
    if allowed is None:
        chosen = tuner.choose(key, candidates, settings.tune)
    elif candidates:
        chosen = _of_some(key, candidates, cache)
    else:
        raise FluxError(
            f'mode is "{settings.mode}", and {call.op} has none of its forms '
            f'({", ".join(allowed)}) in this installation; use mode "auto"'
        )
    return offered[chosen.label][1]


def _class_of(
    problem: Problem,
    arena: Arena,
    settings: Settings,
    allowed: tuple[str, ...] | None,
    when: Mode,
    cache: TuningCache,
) -> Key:
    """What was measured beside a form on request is a class of its own: operators that do not ask
    for it, or may not take it, never meet its choices. "auto" reads the other class where there is
    none of its own."""
    asked = [name for name in settings.asked if allowed is None or name in allowed]
    key = Key.of(problem, when, device=arena.device, asked=",".join(asked))
    reads_other = settings.mode == "auto" and settings.tune == "cache" and cache.get(key) is None
    return replace(key, asked="") if reads_other else key


def choose_pair(problem: Problem, arena: Arena, settings: Settings, when: Mode) -> Bound | None:
    """The fused form of two products; None where it cannot run, or is not what should.

    problem  of both together. It was tuned, if at all, as one product of its size.
    """
    cache, _ = _tuner_of(arena, settings.cache)
    key = Key.of(problem, when, device=arena.device)
    by_rule = default_form(key.problem, when) == "fused"
    if settings.mode == "chunked" or not settings.spin or not (by_rule or settings.mode == "fused"):
        return None
    offered = [
        Candidate("fused", config, _never)
        for config in pair.configs(_largest(problem), capability_of(arena.device))
    ]
    if not offered:
        return None
    config = _of_some(key, offered, cache).config
    return Bound("fused", pair.fused, arena, {"config": config})


def _largest(problem: Problem) -> Problem:
    """Of the shape class. Its configurations are those of all: a choice is there for all of it."""
    return replace(problem, m=m_class(problem.m))


def _never() -> object:
    raise AssertionError("it is chosen, not measured")


def _candidates(
    name: str, problem: Problem, call: Call, arena: Arena, *, view: bool
) -> Iterator[tuple[Candidate, Bound]]:
    """The form in each of its configurations, bound to the arguments of this call."""
    for config in configs(call.op, name, _largest(problem), capability_of(arena.device)):
        options = {} if config is None else {"config": config}
        if view and views(call.op, name):
            options["view"] = True
        bound = Bound(name, forms(call.op)[name], arena, options)
        yield Candidate(name, config, partial(bound.run, call)), bound


def _allowed(settings: Settings) -> tuple[str, ...] | None:
    """The forms that may be taken, the default last; None: all, by the tuner."""
    if settings.mode != "auto":
        fused = _FUSED_IN_FLIGHT if settings.in_flight else _FUSED
        named = {"fused": fused, "chunked": ("chunked",), "reference": (REFERENCE,)}
        return named[settings.mode]
    if not settings.spin:
        return _WITHOUT_SPINNING
    if not settings.reserve_sms:
        return None
    return ("in_flight", *_RESERVING) if settings.in_flight else _RESERVING


def _of_some(key: Key, candidates: Sequence[Candidate], cache: TuningCache) -> Candidate:
    """Of the forms that are allowed: the fastest where the class was measured, else the default."""
    choice = cache.get(key)
    ms = {} if choice is None else choice.ms
    measured = [candidate for candidate in candidates if candidate.label in ms]
    if measured:
        return min(measured, key=lambda candidate: (ms[candidate.label], candidate.label))
    names = (default_form(key.problem, key.mode), candidates[-1].name)
    return next(c for name in names for c in candidates if c.name == name)


_tuners: dict[tuple[str, str | None], tuple[dist.ProcessGroup, TuningCache, Tuner]] = {}


def _tuner_of(arena: Arena, path: str | None) -> tuple[TuningCache, Tuner]:
    """The tuner of a group and file. Making it is collective."""
    group = arena.group
    found = _tuners.get((group.group_name, path))
    if found is None or found[0] is not group:
        cache = TuningCache() if path is None else TuningCache.load(path)
        cache.replace([*TuningCache.load(SHIPPED).entries(), *cache.entries()])
        timer = EagerTimer(group) if arena.device.type == "cuda" else HostTimer(group)
        found = group, cache, Tuner(cache, group, timer, arena=arena)
        _tuners[group.group_name, path] = found
    return found[1:]
