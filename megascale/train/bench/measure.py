"""One run of a case and its value checks.

The step time is that of the steps after the third (compilation, warm-up, clocks) but the last, as
rank 0 sees it; a step ends with a collective over all ranks, so it is the slowest one's.

Two checks, and what passes neither leaves no row. First: every loss is finite, and the first is
within 0.5 % of what random weights must cost, ln(V) + h std^2 / 2, because the logits of a
normalised hidden state are normal with variance h std^2. That says little about the hidden states:
wrong ones are as random. So, second, a run whose mathematics is another's must have its losses and
the norm of its first gradient, within the noise of the compute's precision.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.config import RunConfig
from megascale.errors import NumericalError
from megascale.train.bench.beside import Beside
from megascale.train.bench.case import WARM_UP_STEPS, Case
from megascale.train.bench.records import RankRecord, facts, read_records
from megascale.train.launch import StoppedError, launch_local

FIRST_LOSS_ERROR = 0.005


@dataclass(frozen=True)
class Noise:
    """Largest relative differences between two orders of the same sums.

    The first loss is a mean over thousands of tokens, of which rounding moves each its own way;
    later ones have gone through updates, where AdamW turns a rounded gradient near zero into a
    whole step.
    Measured in bf16 on a CPU (4 layers, h 256, logits with the variance of h 12288, 2048 tokens a
    step, one rank against two tensor-parallel ones): 4e-5, later 1.1e-4 in 8 steps, norm 2.5e-4.
    The serial block in place of the parallel one: 3e-3, 1.5e-2, 0.47.
    """

    first_loss: float
    later_loss: float
    first_norm: float


NOISE = {
    "bfloat16": Noise(2e-4, 2e-3, 3e-3),
    "float32": Noise(2e-6, 1e-4, 1e-5),
    "float64": Noise(1e-9, 1e-7, 1e-8),
}


@dataclass(frozen=True)
class Run:
    """The lines of a finished run, one a step (`metrics.jsonl`), and what its ranks recorded."""

    steps: Sequence[dict[str, Any]]
    records: Sequence[RankRecord] = ()

    @property
    def timed(self) -> Sequence[dict[str, Any]]:
        return self.steps[WARM_UP_STEPS:-1]

    @property
    def facts(self) -> dict[str, Any]:
        """Of all ranks, over the timed steps (`records.facts`)."""
        return facts(self.records, [step["step"] for step in self.timed])

    @property
    def losses(self) -> list[float]:
        """A loss that is not a number has no value in its line."""
        return [step.get("loss", math.nan) for step in self.steps]


def run_case(case: Case, beside: Beside | None = None) -> Run:
    """Train on ranks of this machine. Raises LaunchError where a rank failed or was stopped.

    beside  what is measured in the ranks' processes besides; None: they are `megascale train`
    """
    with tempfile.TemporaryDirectory(prefix="megascale-bench-") as folder:
        run_dir = Path(folder) / "run"
        overrides = (*case.overrides, f"job.run_dir={run_dir}")
        flags = [part for override in overrides for part in ("--set", override)]
        verb = ["train"] if beside is None else ["bench", "rank", *beside.flags()]
        launch_local([*verb, str(case.recipe), *flags], case.num_ranks, run_dir / "logs", None)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        records = read_records(run_dir / "telemetry")
    wanted = case.config.training.steps
    if len(lines) < wanted:
        raise StoppedError(f"the run was stopped after {len(lines)} of {wanted} steps: no row")
    return Run([json.loads(line) for line in lines], records)


def check_losses(run: Run, config: RunConfig) -> None:
    """Raises NumericalError where the run did not compute what untrained weights must give."""
    model, losses = config.model, run.losses
    expected = math.log(model.vocab) + model.hidden_size * model.init_std**2 / 2
    if not all(map(math.isfinite, losses)):
        raise NumericalError(f"not every loss is finite: {_shown(losses)}; no row is written")
    if abs(losses[0] / expected - 1) > FIRST_LOSS_ERROR:
        raise NumericalError(
            f"the first loss is {losses[0]:.4f}; untrained weights must cost {expected:.4f} within "
            f"{FIRST_LOSS_ERROR:.1%}: no row is written"
        )


def check_same(run: Run, reference: Run, dtype: str, name: str) -> None:
    """Raises NumericalError where the losses are not those of `reference`, the rung `name`."""
    noise = NOISE[dtype]
    pairs = list(zip(run.losses, reference.losses, strict=True))
    for number, (got, wanted) in enumerate(pairs, start=1):
        bound = noise.first_loss if number == 1 else noise.later_loss
        _check_near(f"the loss of step {number}", got, wanted, bound, name)
    got, wanted = (one.steps[0].get("grad_norm", math.nan) for one in (run, reference))
    _check_near("the norm of the first gradient", got, wanted, noise.first_norm, name)


def _check_near(what: str, got: float, wanted: float, bound: float, name: str) -> None:
    if not abs(got - wanted) <= bound * abs(wanted):  # also where one is not a number
        raise NumericalError(
            f"{what} is {got:.6g}, and {wanted:.6g} in {name!r}, which has the same mathematics; "
            f"noise is at most {bound:g} of it: no row is written"
        )


def _shown(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)
