"""The three outputs of one step, read back by somebody else's reader."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megascale.telemetry import metrics as metrics_module
from megascale.telemetry.metrics import Metrics, MetricsLogger, Throughput, json_line, log_line

FULL = Metrics(
    step=10,
    loss=4.12341,
    grad_norm=1.23,
    lr=3e-4,
    step_s=0.5,
    data_wait_s=0.01,
    tokens_per_s=27483.4,
    tokens_per_s_per_gpu=13741.7,
    tflops=1.97,
    mfu=0.0020,
    mfu_causal=0.0019,
    memory_bytes=1095216660,
    memory_fraction=0.0108,
)


def test_the_log_line() -> None:
    assert log_line(FULL) == (
        "step: 10  loss: 4.1234  grad_norm: 1.2300  lr: 3.00e-04  memory: 1.02GiB(1.08%)  "
        "tps: 27,483  tps/gpu: 13,742  tflops: 1.97  mfu: 0.20%  mfu_causal: 0.19%"
    )


def test_what_is_unknown_is_absent() -> None:
    assert log_line(Metrics(step=3, loss=2.0, skipped_steps=0)) == "step: 3  loss: 2.0000"
    assert log_line(Metrics(step=3, skipped_steps=2)) == "step: 3  skipped: 2"
    assert json.loads(json_line(Metrics(step=3), 1.5)) == {"time": 1.5, "step": 3}


def test_a_loss_that_is_no_number() -> None:
    broken = Metrics(step=3, loss=float("nan"), grad_norm=float("inf"), lr=0.1)
    assert log_line(broken) == "step: 3  loss: nan  grad_norm: inf  lr: 1.00e-01"
    line = json.loads(json_line(broken, 0.0), parse_constant=pytest.fail)
    assert line == {"time": 0.0, "step": 3, "lr": 0.1, "nonfinite": ["loss", "grad_norm"]}


def test_throughput_by_hand() -> None:
    known = Throughput(4, flops_per_token=2e9, flops_per_token_causal=1e9, peak_tflops=100.0)
    assert known.rates(tokens=80_000, seconds=2.0) == {
        "tokens_per_s": 40_000.0,
        "tokens_per_s_per_gpu": 10_000.0,
        "tflops": 20.0,
        "mfu": 0.2,
        "mfu_causal": 0.1,
    }
    unknown = Throughput(4, flops_per_token=2e9, flops_per_token_causal=1e9)
    assert set(unknown.rates(8, 1.0)) == {"tokens_per_s", "tokens_per_s_per_gpu", "tflops"}


def test_every_field_has_a_tensorboard_name() -> None:
    names = {f.name for f in fields(Metrics)} - {"step", "extra"}
    assert set(metrics_module._TENSORBOARD) == names


@pytest.mark.full
def test_console_jsonl_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    lines: list[str] = []
    with MetricsLogger(tmp_path / "run", tensorboard=True, console=lines.append) as logger:
        logger.log(FULL)
        logger.log(Metrics(step=11, loss=4.0, extra={"moe/balance": 0.5}))
    assert lines == [log_line(FULL), "step: 11  loss: 4.0000"]

    first, second = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first.pop("time") > 1.6e9
    assert first == {
        f.name: getattr(FULL, f.name)
        for f in fields(FULL)
        if f.name != "extra" and getattr(FULL, f.name) is not None
    }
    assert second["moe/balance"] == 0.5

    (file,) = (tmp_path / "run" / "tb").iterdir()
    scalars = {
        (value.tag, event.step): float(tensor_util.make_ndarray(value.tensor))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert scalars == pytest.approx(
        {
            ("loss_metrics/global_avg_loss", 10): 4.12341,
            ("grad_norm", 10): 1.23,
            ("lr", 10): 3e-4,
            ("time_metrics/end_to_end(s)", 10): 0.5,
            ("time_metrics/data_loading(s)", 10): 0.01,
            ("time_metrics/data_loading(%)", 10): 2.0,
            ("throughput(tps)", 10): 27483.4,
            ("throughput(tps/gpu)", 10): 13741.7,
            ("tflops", 10): 1.97,
            ("mfu(%)", 10): 0.20,
            ("mfu_causal(%)", 10): 0.19,
            ("memory/max_reserved(GiB)", 10): 1.02,
            ("memory/max_reserved(%)", 10): 1.08,
            ("loss_metrics/global_avg_loss", 11): 4.0,
            ("moe/balance", 11): 0.5,
        },
        rel=1e-6,
    )


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricsLogger(tmp_path, console=lambda line: None) as logger:
            logger.log(Metrics(step=step))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert not (tmp_path / "tb").exists()


def test_without_tensorboard_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lines: list[str] = []
    with MetricsLogger(tmp_path, tensorboard=True, console=lines.append) as logger:
        logger.log(Metrics(step=1))
    hint = "tensorboard is not installed; install it with: pip install 'megascale[telemetry]'"
    assert lines == [hint, "step: 1"]


class _Wandb(ModuleType):
    """The part of the package that is used; `fails`: as without a key and a network."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__("wandb")
        self.fails, self.inits, self.logged = fails, list[dict[str, Any]](), list[Any]()

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(project=None))

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> _Wandb:
        if self.fails:
            raise RuntimeError("api_key not configured (no-tty)")
        self.inits.append(arguments)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.logged.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.logged.append("finished")


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    for step in (10, 9):  # the second start goes on in the same run
        with MetricsLogger(tmp_path, wandb=True, console=lambda _line: None) as logger:
            logger.log(Metrics(step=step, loss=4.0, mfu=0.5))
    logged = {"loss_metrics/global_avg_loss": 4.0, "mfu(%)": 50.0, "step": 10}
    assert stand_in.logged[:3] == [("*", "step"), logged, "finished"]
    assert stand_in.logged[4]["step"] == 9
    first, second = stand_in.inits
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == (
        "megascale",
        tmp_path.name,
        "allow",
    )
    assert first["id"] == (tmp_path / "wandb_run_id").read_text().strip()


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        (None, "wandb is not installed; install it with: pip install wandb, or set"),
        (
            _Wandb(fails=True),
            "wandb does not start (RuntimeError: api_key not configured (no-tty))",
        ),
    ],
)
def test_without_wandb_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    lines: list[str] = []
    with MetricsLogger(tmp_path, wandb=True, console=lines.append) as logger:
        logger.log(Metrics(step=1))
    assert lines[0].startswith(hint)
    assert lines[1:] == ["step: 1"]


@pytest.mark.full
def test_telemetry_does_not_import_torch(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
import megascale.units, megascale.env, megascale.events
import megascale.telemetry.recorder, megascale.telemetry.writer
from megascale.telemetry.metrics import Metrics, MetricsLogger
with MetricsLogger(Path({str(tmp_path)!r}), tensorboard=True) as logger:
    logger.log(Metrics(step=1, loss=2.0))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
