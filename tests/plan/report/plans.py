"""A plan by hand: small numbers that a test can check by eye."""

from __future__ import annotations

from dataclasses import replace

from megascale.config import ModelConfig
from megascale.plan.case import Job, Layout
from megascale.plan.search.explain import why_slower
from megascale.plan.search.result import Confidence, Plan, Ranked, Sweep, Training

GIB = 2**30


def ranked(place: int, layout: Layout, parts: dict[str, float], *gib: float) -> Ranked:
    step_s = sum(parts.values())
    return Ranked(
        layout=layout,
        place=place,
        step_s=step_s,
        mfu=2.0 / step_s,
        mfu_causal=1.9 / step_s,
        parts=parts,
        stage_bytes=tuple(int(one * GIB) for one in gib),
        estimate_s=step_s * 0.99,
        simulated=place < 3,
    )


BEST = ranked(
    1,
    Layout(tensor=2, pipeline=2, virtual=2, data=4, schedule="interleaved_1f1b"),
    {"gemm": 3.0, "bubble": 0.5, "tensor": 0.5},
    20.0,
    30.5,
)
SECOND = ranked(
    2,
    Layout(tensor=4, pipeline=1, data=4, micro_batch_size=2, recompute="full"),
    {"gemm": 3.3, "bubble": 0.0, "tensor": 0.9},
    28.5,
)
OWN = ranked(
    17,
    Layout(tensor=1, pipeline=4, data=4),
    {"gemm": 3.0, "bubble": 2.0, "tensor": 0.0},
    40.0,
    30.0,
    20.0,
    10.0,
)

PLAN = Plan(
    job=Job(ModelConfig(preset="tiny-llama"), 64, 1000),
    cluster="h200",
    device="NVIDIA H200",
    num_devices=16,
    devices_per_node=8,
    limit_bytes=130.66 * GIB,
    memory_bytes=139.0 * GIB,
    num_legal=12_345,
    num_fit=6_789,
    num_simulated=2,
    seconds=1.25,
    ranked=(BEST, SECOND),
    given=OWN,
    given_problem="",
    why=why_slower(BEST, SECOND),
    confidence=Confidence(0.041, -0.012, 9, 4, "runs of this project on H200s"),
    assumptions=("no effects of scale",),
    sweeps=(Sweep("tensor", (1, 2, 4), (4.5, 4.0, 4.2)), Sweep("data", (4,), (4.0,))),
    training=Training(
        tokens=1.6e9,
        tokens_per_s=16_000.0,
        days=1e5 / 86400.0,
        gpu_hours=16e5 / 3600.0,
        price_per_gpu_hour=2.5,
        ettr=0.8,
        ettr_low=0.7,
        ettr_high=0.85,
        ettr_of={"rsc-2": 0.9, "llama3": 0.8, "rsc-1": 0.0},
        assumptions=("a failure in 4 h",),
    ),
    command=("megascale train r.toml", "--set a.b=1"),
)


def without(plan: Plan = PLAN) -> Plan:
    """The same, of whom nobody asked for tokens, and that has no recipe's layout."""
    return replace(plan, training=None, given=None, given_problem="3 does not divide 4")
