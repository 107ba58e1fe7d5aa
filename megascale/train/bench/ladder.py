"""MegaScale's ablation (MegaScale 6.1, Table 3) as data: rungs, each with switches of its own.

The baseline does what the paper's did (Megatron-LM at commit 285068c8): all-gathers and
reduce-scatters of the forward exposed, those of the backward beside the other GEMM; paired
transfers of the pipeline; gradients reduced after all of backward, parameters gathered after the
step; a kernel for each elementwise operation; a loss that is read before the next step; no control
of garbage collection. The order is the paper's, and a rung has the switches of all below it too. A
rung that means nothing in a layout (an overlap of transfers that the layout has not) is left out by
name.

The paper's window is not stated; 768 of 2048 tokens is what its FLOPs a token imply. What its
"misc" was is not stated in detail: data pipeline, and problematic code removed (MegaScale 6.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from megascale.config import RunConfig
from megascale.errors import ConfigError
from megascale.topology import Mesh
from megascale.train.bench.case import Case, make_case


@dataclass(frozen=True)
class Scaled:
    """A share of a whole number of the baseline's configuration, rounded down, at least 1."""

    key: str
    factor: Fraction

    def of(self, config: RunConfig) -> int:
        section, _, key = self.key.partition(".")
        return max(1, int(getattr(getattr(config, section), key) * self.factor))


@dataclass(frozen=True)
class Rung:
    """A line of the ladder.

    section           of the paper
    settings          keys and values added to those of the rungs below
    paper_gain        of MFU as a fraction, over the paper's rung before (175B, 256 GPUs, Table 3)
    needs             an axis of the mesh without which the rung means nothing
    same_mathematics  the losses are those of the rung before, within noise
    """

    name: str
    section: str
    settings: Mapping[str, str | Scaled] = field(default_factory=dict)
    paper_gain: float | None = None
    needs: str | None = None
    same_mathematics: bool = False


LADDER = (
    Rung(
        "baseline",
        "6.1",
        {
            "model.block": "serial",
            "model.attention_window": "null",
            "parallelism.flux": "reference",
            "parallelism.pipeline_transfers": "coupled",
            "parallelism.overlap_grad_reduce": "false",
            "parallelism.overlap_param_gather": "false",
            "operators.mode": "plain",
            "data.prefetch": "0",
            "training.gc": "automatic",
            "training.run_ahead": "false",
            "optimizer.name": "adamw",
        },
    ),
    Rung("parallel block", "3.1", {"model.block": "parallel"}, 0.046),
    Rung(
        "sliding window",
        "3.1",
        {"model.attention_window": Scaled("training.seq_len", Fraction(768, 2048))},
        0.010,
    ),
    Rung(
        "TP overlap",
        "3.2",
        {"parallelism.flux": "auto"},
        0.022,
        needs="tensor",
        same_mathematics=True,
    ),
    Rung(
        "PP overlap",
        "3.2",
        {"parallelism.pipeline_transfers": "decoupled"},
        0.025,
        needs="pipeline",
        same_mathematics=True,
    ),
    Rung(
        "DP overlap",
        "3.2",
        {
            "parallelism.overlap_grad_reduce": "true",
            "parallelism.overlap_param_gather": "true",
        },
        0.015,
        needs="data",
        same_mathematics=True,
    ),
    Rung(
        "efficient operators",
        "3.3",
        {"operators.mode": "fused"},
        0.017,
        same_mathematics=True,
    ),
    Rung(
        "misc",
        "6.1",
        {
            "data.prefetch": "2",
            "training.gc": "agreed",
            "training.run_ahead": "true",
        },
        0.011,
        same_mathematics=True,
    ),
    Rung(
        "LAMB 3x batch",
        "3.1",
        {
            "optimizer.name": "lamb",
            "training.global_batch_size": Scaled("training.global_batch_size", Fraction(3)),
        },
        0.030,
    ),
)


@dataclass(frozen=True)
class Planned:
    """A rung in a layout.

    settings     what it adds, as overrides
    case         None where it is left out, and `left_out` says why
    mathematics  the rung whose losses this one has: its own name where it changes them
    """

    rung: Rung
    settings: tuple[str, ...]
    case: Case | None
    left_out: str | None
    mathematics: str


def settings_of(rung: Rung, config: RunConfig) -> tuple[str, ...]:
    """What the rung adds, as overrides; `config` is the baseline's."""
    return tuple(
        f"{key}={value.of(config) if isinstance(value, Scaled) else value}"
        for key, value in rung.settings.items()
    )


def why_left_out(rung: Rung, mesh: Mesh) -> str | None:
    """Why the rung is not run in this layout; None where it is."""
    if rung.needs is not None and getattr(mesh, rung.needs) == 1:
        return f"not in this layout: one rank along the {rung.needs} axis"
    return None


def plan_ladder(
    recipe: Path, overrides: Sequence[str], num_ranks: int, *, model: str | None, num_gpus: int
) -> list[Planned]:
    """Every rung with its checked case. Raises MegascaleError where the recipe cannot take one."""
    _check_overrides(overrides)

    def case_of(settings: Sequence[str]) -> Case:
        wanted = [*overrides, *settings]
        return make_case(recipe, wanted, num_ranks, model=model, num_gpus=num_gpus)

    config = case_of(()).config
    mesh = config.mesh(num_ranks)
    planned: list[Planned] = []
    below: list[str] = []
    mathematics = ""
    for rung in LADDER:
        left_out = why_left_out(rung, mesh)
        if left_out is not None:
            planned.append(Planned(rung, (), None, left_out, rung.name))
            continue
        settings = settings_of(rung, config)
        below.extend(settings)
        mathematics = mathematics if rung.same_mathematics else rung.name
        try:
            case = case_of(below)
        except ConfigError as error:
            raise ConfigError(
                f"this recipe cannot take the rung {rung.name!r} of the ladder, which sets "
                f"{', '.join(settings)}: {error}. Nothing was started; choose another recipe, or "
                "measure this one without --ablate"
            ) from None
        planned.append(Planned(rung, settings, case, None, mathematics))
    return planned


def _check_overrides(overrides: Sequence[str]) -> None:
    """The ladder's switches are its own; the batch is the recipe's until the last rung."""
    switches = {key for rung in LADDER for key, value in rung.settings.items()}
    switches.discard("training.global_batch_size")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in switches:
            raise ConfigError(
                f"--set {override} is given with --ablate, whose rungs set {key} themselves; leave "
                "it out, or measure one case without --ablate"
            )
