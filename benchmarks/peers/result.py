"""The line of JSON that a peer prints, and the value check that it must pass before it counts."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megascale.config import ModelConfig
from megascale.errors import NumericalError
from megascale.train.bench.case import WARM_UP_STEPS

FIRST_LOSS_ERROR = 0.01
OUT_OF_MEMORY = "out of memory"
OUT_OF_MEMORY_CODE = 3  # exit code of a run that did not fit


@dataclass(frozen=True)
class Result:
    """One run of a peer.

    step_s          of every step, the slowest rank's
    median_s        the slowest rank's median of the timed steps: after warm-up, without the last
    losses          by step; may be those of the first and the last step only
    expected_loss   of untrained weights, by the peer's own initialisation
    peak_reserved_gb, peak_allocated_gb  of the fullest rank, in 10^9 bytes
    settings        what the peer got: kernels, flags, precisions
    """

    system: str
    version: str
    model: str
    step_s: Sequence[float]
    median_s: float
    losses: Sequence[float]
    expected_loss: float
    peak_reserved_gb: float
    peak_allocated_gb: float
    settings: Mapping[str, Any] = field(default_factory=dict)


def timed(step_s: Sequence[float]) -> Sequence[float]:
    """Of all steps those that count, as `megascale bench step` has it."""
    return step_s[WARM_UP_STEPS:-1]


def median_of_timed(step_s: Sequence[float]) -> float:
    return statistics.median(timed(step_s))


def expected_gpt_loss(model: ModelConfig) -> float:
    """Normalised activations times a head of std `init_std`: logits of variance h x std^2."""
    return math.log(model.vocab) + model.hidden_size * model.init_std**2 / 2


def expected_titan_loss(model: ModelConfig) -> float:
    """TorchTitan's head: std 1/sqrt(h), cut at 3 of them, which leaves 0.9733 of the variance."""
    return math.log(model.vocab) + 0.9733 / 2


def check(result: Result) -> None:
    """Raises NumericalError where the run did not compute what untrained weights must give."""
    if not result.losses or not all(map(math.isfinite, result.losses)):
        raise NumericalError(f"{result.system}: losses {list(result.losses)} are not all finite")
    first = result.losses[0]
    if abs(first / result.expected_loss - 1) > FIRST_LOSS_ERROR:
        raise NumericalError(
            f"{result.system}: the first loss is {first:.4f}; its untrained weights must cost "
            f"{result.expected_loss:.4f} within {FIRST_LOSS_ERROR:.0%}"
        )


def as_line(result: Result) -> str:
    return json.dumps({"peer": asdict(result)})


def failure_line(system: str, reason: str) -> str:
    return json.dumps({"peer_failed": system, "reason": reason})


def find(output: str) -> Result | str | None:
    """The result in what a run printed; the reason it gave for none; None where it said nothing.

    torchrun may put a prefix before a line, so the JSON starts at the first brace.
    """
    found: Result | str | None = None
    for line in output.splitlines():
        start = line.find('{"peer')
        if start < 0:
            continue
        try:
            said = json.loads(line[start:])
        except json.JSONDecodeError:
            continue
        if "peer" in said:
            return Result(**said["peer"])
        found = str(said["reason"])
    return found
