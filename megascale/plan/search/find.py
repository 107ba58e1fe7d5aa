"""The search: every legal layout, those that fit, the fastest of them by formula, then simulated.

1. `space.py` lists all legal layouts in columns.
2. `fit.py` leaves out what does not fit in memory with the device's reserve (at least 6 %).
3. The closed form (`plan/estimate_many.py`) prices all of them at once.
4. The best of different kinds (`finalists.py`) whose memory fits as a dry run tells it are priced
   with the network's effects of scale, and the best of those simulated, action by action, with all
   effects: what formulas simplify does not decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from megascale.plan.case import Case, Layout
from megascale.plan.columns import Floats
from megascale.plan.effects.effects import Effects
from megascale.plan.estimate import estimate, estimate_of
from megascale.plan.estimate_many import estimate_many
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.usable import usable_bytes
from megascale.plan.pricing import price
from megascale.plan.search.finalists import candidates, finalists, group_of, num_computes
from megascale.plan.search.fit import does_not_fit, most_bytes, nothing_fits
from megascale.plan.search.nearest import check_whole_nodes, no_legal_layout
from megascale.plan.search.parts import of_formula, of_simulation
from megascale.plan.search.question import Question, stage_memory
from megascale.plan.search.result import Ranked, Sweep
from megascale.plan.search.scale import IDEAL, Scale
from megascale.plan.search.space import Space, legal_layouts
from megascale.plan.simulate import simulate

_MOST_COMPUTES = 60_000  # of a schedule that is simulated: two seconds
_SWEPT = (
    ("tensor", "tensor parallel size"),
    ("pipeline", "pipeline stages"),
    ("micro_batch_size", "micro-batch size"),
)
EffectsOf = Callable[[Case, Cluster], Effects]


@dataclass(frozen=True)
class Found:
    """What a search found.

    ranked   the best of each (tensor, pipeline, data, micro-batch), the fastest first
    given    the recipe's own layout, and where it would stand; None: `given_problem` says why
    seconds  that the search took
    """

    ranked: tuple[Ranked, ...]
    given: Ranked | None
    given_problem: str
    num_legal: int
    num_fit: int
    num_simulated: int
    sweeps: tuple[Sweep, ...]
    seconds: float


def find(
    question: Question,
    cluster: Cluster,
    *,
    scale: Scale = IDEAL,
    top: int = 5,
) -> Found:
    """The best layouts on `cluster`. ConfigError where none is legal, or none fits."""
    began = time.perf_counter()
    space, limit = legal_space(question), usable_bytes(cluster.device)
    memory = most_bytes(question, space)
    fitting = space.take(memory <= limit)
    seconds = formula_seconds(question, fitting, cluster)
    many = candidates(fitting, np.argsort(seconds, kind="stable"), num_groups=top)
    if scale.tells_apart(cluster):
        many.sort(key=lambda layout: _formula(question, cluster, layout, scale.of_network))
    chosen = finalists(
        many,
        num_groups=top,
        most_computes=_MOST_COMPUTES,
        computes_of=lambda layout: num_computes(layout, question.case(layout).micro_batches),
        fits=lambda layout: question.most_bytes(layout) <= limit,
    )
    if not chosen:
        raise nothing_fits(question, cluster, space, memory)
    given, problem = question.given, question.given_problem
    if given is not None and question.most_bytes(given) > limit:
        problem = does_not_fit(question, given, limit)
        given = None
    layouts = dict.fromkeys(chosen if given is None else [*chosen, given])
    judged = [judge(question, cluster, layout, scale) for layout in layouts]
    judged.sort(key=lambda one: one.step_s)
    return Found(
        ranked=_best_of_groups(judged, top),
        given=next((_placed(one, seconds) for one in judged if one.layout == given), None),
        given_problem=problem,
        num_legal=len(space),
        num_fit=len(fitting),
        num_simulated=sum(one.simulated for one in judged),
        sweeps=tuple(sweep_of(fitting, seconds, *column) for column in _SWEPT),
        seconds=time.perf_counter() - began,
    )


def legal_space(question: Question) -> Space:
    """All layouts that the trainer would take. ConfigError where there are none."""
    check_whole_nodes(question.num_devices, question.devices_per_node)
    space = question.fits_software(
        legal_layouts(
            question.job,
            question.num_devices,
            limits=question.limits,
            batch_sizes=question.batch_sizes,
            transfers=question.software.transfers,
        )
    )
    if not len(space):
        raise no_legal_layout(
            question.job,
            question.num_devices,
            max_tensor=question.limits.max_tensor,
            batch_sizes=question.batch_sizes,
            devices_per_node=question.devices_per_node,
        )
    return space


def formula_seconds(question: Question, space: Space, cluster: Cluster) -> Floats:
    """The closed form's step of every layout; each with the software that the trainer takes."""
    seconds = np.empty(len(space))
    for chosen, part, software in question.by_software(space):
        many = estimate_many(question.job, software, part, cluster)
        seconds[chosen] = many.step_s
    return seconds


def _formula(
    question: Question, cluster: Cluster, layout: Layout, effects: EffectsOf = IDEAL.of
) -> float:
    """The closed form's step of one layout."""
    case = question.case(layout)
    prices = price(case, cluster, effects(case, cluster))
    return estimate(case, prices, cluster.device.peak_tflops).step_s


def judge(question: Question, cluster: Cluster, layout: Layout, scale: Scale = IDEAL) -> Ranked:
    """One layout, as exactly as there is: by simulation, or by the formula where its schedule is
    too long for one; its memory as a dry run tells it. Whether it fits is not asked."""
    case = question.case(layout)
    prices = price(case, cluster, scale.of(case, cluster))
    peak = cluster.device.peak_tflops
    is_short = num_computes(layout, case.micro_batches) <= _MOST_COMPUTES
    if is_short:
        parts = of_simulation(simulate(case, prices).mean_parts)
    else:
        parts = of_formula(estimate(case, prices, peak).parts)
    step = estimate_of(case, parts, peak)
    return Ranked(
        layout=layout,
        place=0,
        step_s=step.step_s,
        mfu=step.mfu,
        mfu_causal=step.mfu_causal,
        parts=parts,
        stage_bytes=tuple(memory.total_bytes for memory in stage_memory(case)),
        estimate_s=_formula(question, cluster, layout),
        simulated=is_short,
    )


def _best_of_groups(finalists: list[Ranked], top: int) -> tuple[Ranked, ...]:
    """The first of each group, with their places."""
    best: dict[tuple[int, ...], Ranked] = {}
    for one in finalists:
        best.setdefault(group_of(one.layout), one)
    shown = list(best.values())[:top]
    return tuple(replace(one, place=place) for place, one in enumerate(shown, 1))


def _placed(own: Ranked, seconds: Floats) -> Ranked:
    """With its place among all that fit, as the formula sees them."""
    faster = int(np.count_nonzero(seconds < own.estimate_s * (1.0 - 1e-9)))
    return replace(own, place=1 + faster)


def sweep_of(space: Space, seconds: Floats, column: str, name: str) -> Sweep:
    """The best step for each value of a column."""
    values = getattr(space, column)
    found = np.unique(values)
    best = [float(seconds[values == value].min()) for value in found]
    return Sweep(name, tuple(map(int, found)), tuple(best))
