"""The log line and its numbers. Rates cover the device's time from the last step of one log line to
that of the next, all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from megascale.telemetry.metrics import Metrics, MetricsLogger, Throughput
from megascale.train.assemble import Assembly
from megascale.train.host import Moment
from megascale.train.recording import device_name
from megascale.train.run_folder import RunFolder
from megascale.units import flops_per_token, peak_tflops

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepValues:
    """A finished step on the host."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_samples: int
    consumed_samples: int
    masked: bool  # the gradient was not finite, the update was not applied
    stop_votes: int
    tier_votes: int = 0  # tiers whose time is up by the writer's clock


class Reporter:
    """Turns step values into metrics on rank 0; on other ranks it does nothing.

    A full disk costs lines of metrics, never the run.
    """

    def __init__(self, assembly: Assembly, folder: RunFolder) -> None:
        self.config = assembly.config
        self.device = assembly.device
        self.data_wait_s = 0.0
        self.num_skipped = 0
        self._logger: MetricsLogger | None = None
        if assembly.is_writer:
            self._logger = MetricsLogger(
                folder.path,
                tensorboard=self.config.metrics.tensorboard,
                wandb=self.config.metrics.wandb,
                console=_say,
            )
        self._throughput = _throughput(assembly)
        self._since = Moment(self.device)
        self._steps = self._samples = 0
        self._validation_loss: float | None = None

    def finished(self, values: StepValues, moment: Moment) -> None:
        """Take one step, which ended at `moment`; write a line every `metrics.log_interval` steps
        and at the last."""
        self.num_skipped += values.masked
        self._steps += 1
        self._samples += values.num_samples
        config = self.config
        due = values.step % config.metrics.log_interval == 0 or values.step in (
            1,
            config.training.steps,
        )
        if due:
            self._write(values, moment)

    def validated(
        self, step: int, loss: float, of_parts: Mapping[str, float] | None = None
    ) -> None:
        """A validation after `step`; its time is not charged to the steps around it.

        of_parts  the loss of each part of a mixture
        """
        extra = {f"validation_loss/{name}": value for name, value in (of_parts or {}).items()}
        self._log(Metrics(step=step, validation_loss=loss, extra=extra))
        self.restart_clock()

    def restart_clock(self) -> None:
        """After work that is no step (validation, checkpoint, loading)."""
        self._start_at(Moment(self.device))

    def _start_at(self, moment: Moment) -> None:
        self._since = moment
        self._steps = self._samples = 0
        self.data_wait_s = 0.0

    def close(self) -> None:
        if self._logger is not None:
            try:
                self._logger.close()
            except OSError as error:
                logger.warning("the last metrics were not written: %s", error)

    def _log(self, metrics: Metrics) -> None:
        if self._logger is not None:
            try:
                self._logger.log(metrics)
            except OSError as error:
                logger.warning("metrics of step %d were not written: %s", metrics.step, error)

    def _write(self, values: StepValues, moment: Moment) -> None:
        seconds = moment.seconds_since(self._since)
        seq_len = self.config.training.seq_len
        self._log(
            Metrics(
                step=values.step,
                loss=values.loss,
                grad_norm=values.grad_norm,
                lr=values.lr,
                step_s=seconds / self._steps,
                data_wait_s=self.data_wait_s / self._steps,
                global_batch_size=values.num_samples,
                consumed_tokens=values.consumed_samples * seq_len,
                skipped_steps=self.num_skipped,
                **cast(Any, self._throughput.rates(self._samples * seq_len, seconds)),
                **cast(Any, memory(self.device)),
            )
        )
        self._start_at(moment)


def _say(line: str) -> None:
    with suppress(OSError):  # a closed terminal costs what it would show, nothing of the records
        print(line, flush=True)


def _throughput(assembly: Assembly) -> Throughput:
    config = assembly.config
    known = peak_tflops(device_name(assembly.device))
    peak = config.metrics.peak_tflops or (known[0] if known else None)
    return Throughput(
        num_devices=assembly.mesh.world_size,
        flops_per_token=flops_per_token(config.model, config.training.seq_len, "full"),
        flops_per_token_causal=flops_per_token(config.model, config.training.seq_len, "half"),
        peak_tflops=peak,
    )


def resources(assembly: Assembly) -> dict[str, Any]:
    """For whoever compares ranks after a run: this one's peak memory, and the forms that its
    tensor-parallel operators took."""
    ops = assembly.ops
    forms = {
        problem: form
        for operator in (ops.all_gather_gemm, ops.gemm_reduce_scatter)
        for problem, form in operator.forms_taken().items()
    }
    return {**memory(assembly.device), "forms": forms}


def memory(device: torch.device) -> dict[str, int | float]:
    """Fields of `Metrics`: the device's allocator, or the process's peak resident size."""
    if device.type != "cuda":
        import resource

        return {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    stats = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    reserved = stats["reserved_bytes.all.peak"]
    return {
        "memory_bytes": reserved,
        "memory_fraction": reserved / total,
        "active_bytes": stats["active_bytes.all.peak"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
    }
