"""A case of the bench `step`: a recipe with overrides on a number of ranks, checked.

Everything that can be refused is refused here, before a rank is started: what `megascale train`
refuses, and what the bench cannot measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.config import RunConfig, load_config
from megascale.errors import ConfigError
from megascale.plan.describe import describe
from megascale.train.corpus import resolve_vocabulary
from megascale.train.devices import check_devices_can, runs_on_gpus

WARM_UP_STEPS = 3
LEAST_STEPS = WARM_UP_STEPS + 2  # one is timed; the last step's time includes draining the device
# Of every run: each step has its line, and nothing is kept that the bench throws away.
QUIET = (
    "metrics.log_interval=1",
    "metrics.tensorboard=false",
    "checkpoint.enable=false",
    "validation.interval=0",
)


@dataclass(frozen=True)
class Case:
    """What one run measures. `config` is that of `recipe` with `overrides`."""

    model: str
    recipe: Path
    overrides: tuple[str, ...]
    config: RunConfig
    num_ranks: int

    @property
    def keys(self) -> dict[str, Any]:
        """The case in a row of `step` (`benchmarks/README.md`)."""
        config, mesh = self.config, self.config.mesh(self.num_ranks)
        return {
            "model": self.model,
            "tp": mesh.tensor,
            "pp": mesh.pipeline,
            "vp": config.parallelism.virtual_pipeline_size,
            "dp": mesh.data,
            "mbs": config.training.micro_batch_size,
            "gbs": config.training.global_batch_size,
            "seq": config.training.seq_len,
            "block": config.model.block,
            "attention": "window" if config.model.attention_window else "full",
            "recompute": config.activation_checkpoint.mode,
            "flux": config.parallelism.flux if mesh.tensor > 1 else "none",
        }

    @property
    def settings(self) -> dict[str, Any]:
        """What a row of `step` says beside `keys`: choices that change its speed, not its case."""
        par = self.config.parallelism
        return {
            "schedule": par.schedule if par.pipeline_parallel_size > 1 else "none",
            "share_head": par.share_head,
            "join_weight_gradients": par.join_weight_gradients,
        }

    @property
    def switches(self) -> dict[str, Any]:
        """What a row of `ladder` says beside `keys`: the switches that those leave out."""
        config, mesh = self.config, self.config.mesh(self.num_ranks)
        par, training = config.parallelism, config.training
        overlaps = par.overlap_grad_reduce and par.overlap_param_gather
        old_host = training.gc == "automatic" and not training.run_ahead
        return {
            "window": config.model.attention_window,
            "transfers": par.pipeline_transfers if mesh.pipeline > 1 else "none",
            "dp_overlap": ("yes" if overlaps else "no") if mesh.data > 1 else "none",
            "operators": config.operators.mode,
            "host": "waits" if old_host else "ahead",
            "optimizer": config.optimizer.name,
        }


def make_case(
    recipe: Path, overrides: Sequence[str], num_ranks: int, *, model: str | None, num_gpus: int
) -> Case:
    """The case, checked. Raises MegascaleError for what cannot be run or measured here."""
    wanted = (*overrides, *QUIET)
    config = resolve_vocabulary(load_config(recipe, wanted))
    describe(config, num_ranks)  # runs every check of the layout
    _check_devices(config, num_ranks, num_gpus)
    _check_measurable(config)
    return Case(model or config.model.preset or recipe.stem, recipe, wanted, config, num_ranks)


def _check_devices(config: RunConfig, num_ranks: int, num_gpus: int) -> None:
    if runs_on_gpus(config, num_gpus) and num_ranks > num_gpus:
        instead = f"start at most {num_gpus} (--nproc), or " if num_gpus else ""
        raise ConfigError(
            f"{num_ranks} rank(s) need a GPU each and this machine has {num_gpus}; {instead}"
            "measure on the CPU with --set training.device=cpu"
        )
    check_devices_can(config, num_ranks, lambda: num_gpus)


def _check_measurable(config: RunConfig) -> None:
    training = config.training
    if training.steps < LEAST_STEPS:
        raise ConfigError(
            f"training.steps is {training.steps}; the bench leaves out the first {WARM_UP_STEPS} "
            f"and the last, so give {LEAST_STEPS} or more (10 is usual)"
        )
    if training.batch_ramp_up is not None:
        raise ConfigError(
            "training.batch_ramp_up is given; the bench times steps of one batch: set "
            "training.batch_ramp_up=null"
        )
    if config.checkpoint.initial_load_path:
        raise ConfigError(
            f"checkpoint.initial_load_path is {config.checkpoint.initial_load_path!r}; the bench "
            'checks the loss of untrained weights: set checkpoint.initial_load_path=""'
        )
