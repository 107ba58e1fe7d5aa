"""What a run does besides training: its records, validation, retention, plan, and stopping."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.config import load_config
from megascale.events import Header, Span, Sums, read_events
from megascale.optim import learning_rate
from megascale.telemetry.hooks import Hook
from megascale.train import rank as rank_module
from megascale.train import recording, validation
from megascale.train.host import runs_ahead
from megascale.train.loop import Loop
from megascale.train.run_folder import RunFolder
from tests.train.command import SMALL, end, flags, run_here, started, train_here, write_recipe
from tests.train.runs import (
    SINGLE,
    Layout,
    assert_same_bits,
    checkpoints,
    curve,
    metrics,
    samples,
    train,
)
from tools.blocks import ROOT

PP2_DP2: Layout = {"tp": 1, "dp": 2, "pp": 2}
TP2: Layout = {"tp": 2, "dp": 1, "pp": 1}
OPTIONS = ["model.num_layers=2", "training.global_batch_size=4", "training.steps=6"]
TWO_MICRO_BATCHES = [*OPTIONS, "training.micro_batch_size=2"]  # without data parallelism
Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------- records


def test_metrics_say_what_was_done(tmp_path: Path, monkeypatch: Patch) -> None:
    run = tmp_path / "run"
    schedule = ["lr_scheduler.warmup_steps=3", "lr_scheduler.decay_type=linear"]
    settings = [*schedule, "training.steps=8", "metrics.log_interval=3", "metrics.tensorboard=true"]
    assert train_here(monkeypatch, run, *settings) == 0
    lines, config = metrics(run), RunFolder(run).load_config()
    assert [line["step"] for line in lines] == [1, 3, 6, 8]
    for line in lines:
        step = line["step"]
        assert line["lr"] == learning_rate(
            step - 1, config.lr_scheduler, lr=config.optimizer.lr, total_steps=8
        )
        assert 5.0 < line["loss"] < 6.5  # ln 256 = 5.55
        assert line["grad_norm"] > 0.0
        assert line["global_batch_size"] == 4
        assert line["consumed_tokens"] == step * 4 * 16
        assert line["tokens_per_s"] == pytest.approx(4 * 16 / line["step_s"])
        assert line["tokens_per_s_per_gpu"] == line["tokens_per_s"]
        assert 0.0 <= line["data_wait_s"] <= line["step_s"]
        assert line["memory_bytes"] > 1 << 20
        assert line["skipped_steps"] == 0
        assert "mfu" not in line  # nobody knows a CPU's peak
    (events,) = (run / "tb").glob("events.out.tfevents.*")
    assert b"loss_metrics/global_avg_loss" in events.read_bytes()


def test_a_closed_terminal_costs_no_record(tmp_path: Path, monkeypatch: Patch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("builtins.print", closed)
    assert train_here(monkeypatch, tmp_path / "run") == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_the_run_folder_tells_where_it_came_from(
    tmp_path: Path, prepared: Path, monkeypatch: Patch
) -> None:
    run = tmp_path / "run"
    data = ["data.synthetic=false", f"data.path={prepared}", "model.vocab_size=null"]
    assert train_here(monkeypatch, run, *data) == 0
    config = RunFolder(run).load_config()
    assert config.model.vocab_size == 280  # resolved from the tokenizer
    assert (run / "tokenizer.json").read_bytes() == (prepared / "tokenizer.json").read_bytes()
    assert train_here(monkeypatch, run, *data, "training.steps=3", more=["--resume"]) == 0
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert ["--resume" in start["command"] for start in starts] == [False, True]
    assert all(start["versions"]["torch"] and start["commit"] for start in starts)
    assert RunFolder(run).load_config().training.steps == 3
    # the folder is a recipe
    assert run_here(monkeypatch, "train", str(run), "--resume", "--set", "training.steps=4") == 0
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]


@pytest.mark.full
def test_every_rank_records_every_phase(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["telemetry.span_interval=3", "checkpoint.interval=3", "validation.interval=3"]
    train(run, PP2_DP2, [*OPTIONS, *more, "training.gc_freq=2"])
    phases = {"data_wait", "forward", "backward", "send", "recv", "grad_sync", "optimizer"}
    phases |= {"param_gather"}
    for rank in range(4):
        events = list(read_events(run / "telemetry" / f"rank_{rank:05d}.jsonl"))
        spans = [event for event in events if isinstance(event, Span)]
        for step in (3, 6):
            assert phases <= {span.name for span in spans if span.step == step}, (rank, step)
        sizes = {(s.name, s.bucket): s.num_bytes for s in spans if s.num_bytes is not None}
        assert {name for name, _ in sizes} == {"send", "recv", "grad_sync", "param_gather"}
        assert sizes["send", None] == sizes["recv", None]
        for (_, bucket), size in sizes.items():  # fp32 both ways, half of a bucket
            assert bucket is None or sizes["grad_sync", bucket] == sizes["param_gather", bucket]
            assert size
        outside = Counter((span.name, span.op) for span in spans if span.step is None)
        expected = {("checkpoint", "keep"): 2, ("validation", None): 2, ("gc", None): 3}
        assert expected.items() <= outside.items(), rank
        sums = {event.step: event.sums for event in events if isinstance(event, Sums)}
        assert list(sums) == [1, 2, 3, 4, 5, 6]
        for of_step in sums.values():
            counts = {name: of_step[name]["count"] for name in phases}
            assert counts["forward"] == counts["backward"] == 2  # micro-batches
            assert counts["send"] == counts["recv"] == 2
            assert counts["optimizer"] == 1
            assert counts["data_wait"] <= 2  # in the first step for the next one's too
            # a linear without tensor peers waits for nobody: its time is computation
            assert not any(name.startswith("tp_") for name in of_step), sorted(of_step)


# ---------------------------------------------------------------- validation, retention


@pytest.mark.full
def test_validation_is_the_same_in_every_layout(tmp_path: Path, prepared: Path) -> None:
    data = ["data.synthetic=false", f"data.path={prepared}", "model.vocab_size=280"]
    more = [*OPTIONS, *data, "validation.interval=4", "validation.batches=2", "optimizer.lr=0.002"]
    found = {}
    for name, layout in {"single": SINGLE, "tp2": TP2, "pp2-dp2": PP2_DP2}.items():
        train(tmp_path / name, layout, more)
        lines = [line for line in metrics(tmp_path / name) if "validation_loss" in line]
        assert [line["step"] for line in lines] == [4, 6]
        found[name] = [line["validation_loss"] for line in lines]
    assert found["single"][1] < found["single"][0]
    assert found["tp2"] == pytest.approx(found["single"], rel=1e-5)
    assert found["pp2-dp2"] == pytest.approx(found["single"], rel=1e-5)


@pytest.mark.parametrize(("entropy", "word"), [(99.0, "under"), (1.0, "over")])
def test_the_bar_is_told_in_words(
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    entropy: float,
    word: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(validation, "unigram_entropy_nats", lambda _config: entropy)
    assert train_here(monkeypatch, tmp_path / "run", "validation.interval=2") == 0
    (line,) = (line for line in caplog.messages if line.startswith("validation loss"))
    loss = metrics(tmp_path / "run")[-1]["validation_loss"]
    assert f" {abs(entropy - loss):.3f} {word} the unigram entropy {entropy:.3f} of" in line


def test_the_last_checkpoints_stay(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run, keep = tmp_path / "run", ["checkpoint.interval=1", "checkpoint.keep_latest_k=2"]
    assert train_here(monkeypatch, run, *keep, "training.steps=5") == 0
    assert checkpoints(run) == ["step-00000004", "step-00000005"]
    assert [line for line in caplog.messages if line.startswith("deleted")] == [
        "deleted step-00000001: the last 2 checkpoints stay (checkpoint.keep_latest_k)"
    ], "said once, and not with every save"
    assert train_here(monkeypatch, run, *keep, "training.steps=9", more=["--resume"]) == 0
    loaded_from = "step-00000005"
    assert checkpoints(run) == [loaded_from, "step-00000008", "step-00000009"]


# ---------------------------------------------------------------- what older loops did


class _Collector(Hook):
    """Whether Python collects by itself, at the end of each step."""

    def __init__(self, seen: list[bool]) -> None:
        self._seen = seen

    def on_step_end(self, step: int) -> None:
        self._seen.append(gc.isenabled())


@pytest.mark.parametrize(("policy", "itself"), [("agreed", False), ("automatic", True)])
def test_who_collects_garbage(
    tmp_path: Path, monkeypatch: Patch, policy: str, itself: bool
) -> None:
    seen: list[bool] = []
    original: Any = recording.open_recorder

    def watched(*arguments: Any) -> Any:
        return original(*arguments[:-1], [_Collector(seen)])

    monkeypatch.setattr(rank_module, "open_recorder", watched)
    settings = [f'training.gc="{policy}"', "training.gc_freq=1"]
    assert train_here(monkeypatch, tmp_path / "run", *settings) == 0
    assert seen == [itself, itself]
    events = read_events(tmp_path / "run" / "telemetry" / "rank_00000.jsonl")
    collections = [e for e in events if isinstance(e, Span) and e.name == "gc"]
    assert len(collections) == (0 if itself else 2)


@pytest.mark.parametrize(
    ("device", "asked", "ahead"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_the_host_runs_ahead_of_a_device_unless_told_not_to(
    device: str, asked: bool, ahead: bool
) -> None:
    config = load_config(None, [f"training.run_ahead={str(asked).lower()}"])
    assert runs_ahead(config.training, torch.device(device)) is ahead


# ---------------------------------------------------------------- the host ahead of the device


@dataclass(frozen=True)
class RunAhead:
    """The host reads a step's values one step later, as on a GPU."""

    stop_after: int | None = None  # this step, the last rank is told to stop

    def __call__(self, rank: Loop) -> None:
        rank._runs_ahead = True
        if rank.assembly.mesh.world_size - 1 == rank.recorder.rank:
            rank.recorder.hooks.append(_Stop(self.stop_after))


class _Stop(Hook):
    def __init__(self, after: int | None) -> None:
        self._after = after

    def on_step_end(self, step: int) -> None:
        if step == self._after:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize("layout", [SINGLE, TP2], ids=["single", "tp2"])
def test_running_ahead_changes_no_value(tmp_path: Path, layout: Layout) -> None:
    more = [*TWO_MICRO_BATCHES, "checkpoint.interval=4", "validation.interval=3"]
    train(tmp_path / "ahead", layout, more, plant=RunAhead())
    train(tmp_path / "plain", layout, more)
    assert curve(tmp_path / "ahead") == curve(tmp_path / "plain")
    assert samples(tmp_path / "ahead") == samples(tmp_path / "plain")
    assert checkpoints(tmp_path / "ahead") == ["step-00000004", "step-00000006"]
    assert_same_bits(tmp_path / "ahead", tmp_path / "plain")
    ahead, plain = (
        [line for line in metrics(tmp_path / name) if "validation_loss" in line]
        for name in ("ahead", "plain")
    )
    for one, other in zip(ahead, plain, strict=True):
        assert one["step"] == other["step"]
        assert one["validation_loss"] == other["validation_loss"]


@pytest.mark.full
def test_stopped_while_ahead_all_save_the_step_that_was_launched(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, TP2, TWO_MICRO_BATCHES, plant=RunAhead(stop_after=2)) == [None, None]
    # asked after 2, said by 3, read when 4 is launched
    assert checkpoints(run) == ["step-00000004"]
    assert list(curve(run)) == [1, 2, 3, 4]
    train(run, TP2, TWO_MICRO_BATCHES, resume=True)
    train(tmp_path / "whole", TP2, TWO_MICRO_BATCHES)
    assert curve(run) == curve(tmp_path / "whole")


# ---------------------------------------------------------------- the plan, and torchrun


@pytest.mark.usefixtures("nothing_starts")
def test_dry_run_prints_the_plan_and_starts_nothing(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    layout = ["parallelism.tensor_parallel_size=2", "parallelism.pipeline_parallel_size=2"]
    assert train_here(monkeypatch, run, *layout, more=["--nproc", "4", "--dry-run"]) == 0
    output = capsys.readouterr().out
    config, rest = json.JSONDecoder().raw_decode(output)
    assert load_config(_write(tmp_path / "again.json", config)).model_dump(mode="json") == config
    plan = output[rest:]
    assert "tensor parallel 2: [0, 1] [2, 3]" in plan
    assert "pipeline parallel 2: [0, 2] [1, 3]" in plan
    # 2 layers of 4 x 32^2 + 3 x 32 x 64 + 2 norms, embedding and head of 256 x 32, a last norm
    assert f"parameters {2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 2 * 256 * 32 + 32:,}" in plan
    for stage in ("0", "1"):
        (row,) = (line for line in plan.splitlines() if line.split()[:1] == [stage])
        assert row.split()[1] == stage  # one layer each
        assert "MiB" in row or "KiB" in row
    assert not run.exists()


def _write(path: Path, config: object) -> Path:
    path.write_text(json.dumps(config))
    return path


@pytest.mark.usefixtures("nothing_starts")
def test_dry_run_of_512_ranks(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = str(ROOT / "recipes" / "gpt3-175b.toml")
    given = flags([f"job.run_dir={run}"])
    assert run_here(monkeypatch, "train", recipe, *given, "--nproc", "512", "--dry-run") == 0
    plan = capsys.readouterr().out
    assert "\n512 ranks\n" in plan
    assert "pipeline parallel 8: [0, 64, ... 448] [1, 65, ... 449]" in plan
    assert "parameters 175,557,206,016 (" in plan
    assert "      7  14-15 30-31 46-47 62-63 78-79 94-95 " in plan
    assert not run.exists()


@pytest.mark.full
def test_under_torchrun_the_same_command_is_one_rank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    given = flags([*SMALL, "training.steps=3", f"job.run_dir={run}"])
    arguments = ["train", str(write_recipe(tmp_path)), *given]
    with started(arguments, (*torchrun, "-m", "megascale")) as process:
        code, output, errors = end(process)
    assert code == 0, errors
    assert output.count("step: 3 ") == 1  # rank 0 alone speaks
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert checkpoints(run) == ["step-00000003"]
    headers = [next(read_events(file)) for file in sorted((run / "telemetry").iterdir())]
    assert all(isinstance(header, Header) and header.world_size == 2 for header in headers)
    assert [header.rank for header in headers] == [0, 1]
