"""The run's metrics: the log line, `metrics.jsonl`, TensorBoard and W&B. One rank writes them.

A value that is not known (the loss of a stage that has none, MFU on an unknown device, memory on a
CPU) is absent from all of them, never a placeholder. A loss that is not a number is known: the line
prints it, JSON names it under `nonfinite`, because JSON has no NaN.

`tokens_per_s` counts all devices together; TorchTitan's `tps` is the figure of one device, here
`tps/gpu`. TensorBoard's names are TorchTitan's where it has one.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from megascale.errors import require_extra
from megascale.units import format_bytes, mfu

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is known after a step. Times and tokens are those since the last log line."""

    step: int
    loss: float | None = None  # mean over all valid tokens of the global batch
    validation_loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    step_s: float | None = None  # of one step
    data_wait_s: float | None = None  # of one step
    tokens_per_s: float | None = None  # all devices together
    tokens_per_s_per_gpu: float | None = None
    tflops: float | None = None  # model TFLOP/s of a device, causal attention in full
    mfu: float | None = None  # fraction, causal attention in full
    mfu_causal: float | None = None  # fraction, half of causal attention
    memory_bytes: int | None = None  # peak reserved on the device, the host's on a CPU
    memory_fraction: float | None = None
    active_bytes: int | None = None  # peak in use
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    global_batch_size: int | None = None
    consumed_tokens: int | None = None
    skipped_steps: int | None = None  # so far, for a gradient that was not finite
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Throughput:
    """Tokens and FLOPs of a run, from which each log line's rates follow.

    `peak_tflops` None: an unknown device, or a CPU; then there is no MFU.
    """

    num_devices: int
    flops_per_token: float
    flops_per_token_causal: float
    peak_tflops: float | None = None

    def rates(self, tokens: int, seconds: float) -> dict[str, float]:
        """Fields of `Metrics` for `tokens` trained on by all devices in `seconds`."""
        tokens_per_s = tokens / seconds
        a_gpu = tokens_per_s / self.num_devices
        rates = {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": a_gpu,
            "tflops": a_gpu * self.flops_per_token / 1e12,
        }
        if self.peak_tflops is not None:
            rates["mfu"] = mfu(a_gpu, self.flops_per_token, 1, self.peak_tflops)
            rates["mfu_causal"] = mfu(a_gpu, self.flops_per_token_causal, 1, self.peak_tflops)
        return rates


# field -> (TensorBoard's name, what a value is multiplied with)
_TENSORBOARD: dict[str, tuple[str, float]] = {
    "loss": ("loss_metrics/global_avg_loss", 1),
    "validation_loss": ("validation_metrics/loss", 1),
    "grad_norm": ("grad_norm", 1),
    "lr": ("lr", 1),
    "step_s": ("time_metrics/end_to_end(s)", 1),
    "data_wait_s": ("time_metrics/data_loading(s)", 1),
    "tokens_per_s": ("throughput(tps)", 1),
    "tokens_per_s_per_gpu": ("throughput(tps/gpu)", 1),
    "tflops": ("tflops", 1),
    "mfu": ("mfu(%)", 100),
    "mfu_causal": ("mfu_causal(%)", 100),
    "memory_bytes": ("memory/max_reserved(GiB)", 1 / GIB),
    "memory_fraction": ("memory/max_reserved(%)", 100),
    "active_bytes": ("memory/max_active(GiB)", 1 / GIB),
    "num_alloc_retries": ("memory/num_alloc_retries", 1),
    "num_ooms": ("memory/num_ooms", 1),
    "global_batch_size": ("global_batch_size", 1),
    "consumed_tokens": ("consumed_tokens", 1),
    "skipped_steps": ("skipped_steps", 1),
}


def log_line(metrics: Metrics) -> str:
    """`step: 10  loss: 4.1234  grad_norm: 1.2300  lr: 3.00e-04  memory: 1.02GiB(1.08%)  ...`."""
    m, parts = metrics, [f"step: {metrics.step}"]

    def add(name: str, value: float | None, form: Callable[[float], str]) -> None:
        if value is not None:
            parts.append(f"{name}: {form(value)}")

    share = "" if m.memory_fraction is None else f"({m.memory_fraction:.2%})"
    add("loss", m.loss, "{:.4f}".format)
    add("validation_loss", m.validation_loss, "{:.4f}".format)
    add("grad_norm", m.grad_norm, "{:.4f}".format)
    add("lr", m.lr, "{:.2e}".format)
    add("memory", m.memory_bytes, lambda value: format_bytes(value) + share)
    add("tps", m.tokens_per_s, "{:,.0f}".format)
    add("tps/gpu", m.tokens_per_s_per_gpu, "{:,.0f}".format)
    add("tflops", m.tflops, "{:.2f}".format)
    add("mfu", m.mfu, "{:.2%}".format)
    add("mfu_causal", m.mfu_causal, "{:.2%}".format)
    add("skipped", m.skipped_steps or None, "{:.0f}".format)
    return "  ".join(parts)


def json_line(metrics: Metrics, unix_s: float) -> str:
    """One line of `metrics.jsonl`: the known values under their field names."""
    known: dict[str, Any] = {"time": round(unix_s, 3)}
    known |= {name: value for name, value in _known(metrics).items() if math.isfinite(value)}
    nonfinite = [name for name, value in _known(metrics).items() if not math.isfinite(value)]
    if nonfinite:
        known["nonfinite"] = nonfinite
    return json.dumps(known, allow_nan=False) + "\n"


def _known(metrics: Metrics) -> dict[str, float]:
    names = (f.name for f in fields(metrics) if f.name != "extra")
    values = {name: getattr(metrics, name) for name in names}
    return {k: v for k, v in values.items() if v is not None} | dict(metrics.extra)


class ScalarWriter(Protocol):
    """The part of `tensorboard.summary.Writer` that is used."""

    def add_scalar(self, tag: str, data: float, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class MetricsLogger:
    """Writes each `Metrics` to the console, `run_dir/metrics.jsonl` and `run_dir/tb`.

    A resumed run appends: of several lines with one step, the last counts. Without their packages
    `tensorboard` and `wandb` print one line that says what to install, and the run goes on.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool = False,
        wandb: bool = False,
        console: Callable[[str], object] = print,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._console = console
        opened = [_open_tensorboard(run_dir / "tb", console) if tensorboard else None]
        opened.append(_open_wandb(run_dir, console) if wandb else None)
        self._writers = [writer for writer in opened if writer is not None]

    def log(self, metrics: Metrics) -> None:
        self._console(log_line(metrics))
        self._file.write(json_line(metrics, time.time()))
        self._file.flush()
        for writer in self._writers:
            _add_all(writer, metrics)

    def close(self) -> None:
        self._file.close()
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _add_all(writer: ScalarWriter, metrics: Metrics) -> None:
    for name, value in _known(metrics).items():
        if name != "step":
            tag, scale = _TENSORBOARD.get(name, (name, 1))
            writer.add_scalar(tag, value * scale, metrics.step)
    if metrics.step_s and metrics.data_wait_s is not None:
        percent = 100 * metrics.data_wait_s / metrics.step_s
        writer.add_scalar("time_metrics/data_loading(%)", percent, metrics.step)
    writer.flush()


def _open_tensorboard(folder: Path, console: Callable[[str], object]) -> ScalarWriter | None:
    """TensorBoard's own event writer; torch's needs torch, which this layer does not have."""
    if importlib.util.find_spec("tensorboard") is None:
        console(str(require_extra("tensorboard", "telemetry")))
        return None
    from tensorboard.summary import Writer

    writer: ScalarWriter = Writer(str(folder))
    return writer


def _open_wandb(run_dir: Path, console: Callable[[str], object]) -> ScalarWriter | None:
    try:
        import wandb
    except ImportError:
        console(
            "wandb is not installed; install it with: pip install wandb, or set metrics.wandb = "
            "false; the run goes on without it"
        )
        return None
    from megascale.telemetry.wandb_writer import WandbWriter

    try:
        return WandbWriter(run_dir, wandb)
    except Exception as error:  # noqa: BLE001 - a service of others must not end a run
        console(
            f"wandb does not start ({type(error).__name__}: {error}); without a network set "
            "WANDB_MODE=offline; the run goes on without it"
        )
        return None
