"""What a search found: plain data that the report prints, plots or writes as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megascale.plan.case import Job, Layout


@dataclass(frozen=True)
class Ranked:
    """A layout and its step. Everything here is predicted.

    place        1 is the fastest that fits
    mfu          attention counted in full (MegaScale); `mfu_causal`: half of it
    parts        seconds of the step by what they go to; their sum is `step_s`
    stage_bytes  memory of a rank, by pipeline stage
    estimate_s   the step by the closed form, on an ideal cluster: what the search sorts by
    """

    layout: Layout
    place: int
    step_s: float
    mfu: float
    mfu_causal: float
    parts: Mapping[str, float]
    stage_bytes: tuple[int, ...]
    estimate_s: float
    simulated: bool

    @property
    def most_bytes(self) -> int:
        return max(self.stage_bytes)

    @property
    def fullest_stage(self) -> int:
        return self.stage_bytes.index(self.most_bytes)


@dataclass(frozen=True)
class Confidence:
    """How far a prediction may be off.

    share          of the step time, to each side: nine of ten validation rows lie within; None: no
                   row of this cluster was ever compared
    bias           mean of predicted / real - 1 over those rows
    num_rows       compared
    largest        devices of the largest row
    source         which rows
    """

    share: float | None
    bias: float
    num_rows: int
    largest: int
    source: str


@dataclass(frozen=True)
class Sweep:
    """The best step time in seconds that fits, for each value of one degree; the rest is free."""

    name: str
    values: tuple[int, ...]
    step_s: tuple[float, ...]


@dataclass(frozen=True)
class Training:
    """A training of `tokens` in days, GPU-hours and money: without faults, and with them.

    ettr       expected share of the time that is new training (`effects/failures.py`)
    ettr_of    the same by the failure rate's name
    """

    tokens: float
    tokens_per_s: float
    days: float
    gpu_hours: float
    price_per_gpu_hour: float | None
    ettr: float
    ettr_low: float
    ettr_high: float
    ettr_of: Mapping[str, float]
    assumptions: tuple[str, ...]

    @property
    def cost(self) -> float | None:
        return None if self.price_per_gpu_hour is None else self.gpu_hours * self.price_per_gpu_hour


@dataclass(frozen=True)
class Plan:
    """The answer.

    ranked     best of each (tensor, pipeline, chunks, data, micro-batch), the fastest first
    given      the recipe's own layout; `given_problem` says why there is none
    why        why the runner-up lost
    num_legal  layouts that the trainer would take; `num_fit` of them fit in memory
    """

    job: Job
    cluster: str
    device: str
    num_devices: int
    devices_per_node: int
    limit_bytes: float
    memory_bytes: float
    num_legal: int
    num_fit: int
    num_simulated: int
    seconds: float
    ranked: tuple[Ranked, ...]
    given: Ranked | None
    given_problem: str
    why: tuple[str, ...]
    confidence: Confidence
    assumptions: tuple[str, ...]
    sweeps: tuple[Sweep, ...]
    training: Training | None
    command: tuple[str, ...]

    @property
    def best(self) -> Ranked:
        return self.ranked[0]

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens_per_step / self.best.step_s
