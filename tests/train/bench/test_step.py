"""`megascale bench step`: rows, refusals before anything starts, and real runs on a CPU."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.train.bench import start
from megascale.train.bench.beside import Beside
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run
from tests.train.bench.planted import FIRST_LOSS, PP2, TINY, TP2, planted_run, write_tiny
from tests.train.command import FRESH, end, flags, run_here, started
from tools import tables
from tools.blocks import ROOT

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

# name: settings, further arguments, GPUs of the machine, what the message says
REFUSED: dict[str, tuple[list[str], list[str], int, str]] = {
    "rounds": ([], ["--rounds", "0"], 0, "--rounds is 0; give 1 or more"),
    "ranks": ([], ["--nproc", "0"], 0, "--nproc is 0; give 1 or more"),
    "GPUs": (
        [TP2],
        ["--nproc", "4", "--ablate"],
        2,
        "4 rank(s) need a GPU each and this machine has 2; start at most 2 (--nproc), or measure",
    ),
    "no GPU": (
        ["training.device=cuda"],
        [],
        0,
        "1 rank(s) need a GPU each and this machine has 0; measure on the CPU with --set",
    ),
    "operators": (
        [TP2, "parallelism.flux=chunked"],
        ["--nproc", "2"],
        0,
        'parallelism.flux is "chunked", and this machine has no CUDA device',
    ),
    "layout": ([PP2], ["--nproc", "3", "--ablate"], 0, "start a multiple of 2 ranks (--nproc"),
    "misspelt": (["model.hidden_sise=3"], ["--ablate"], 0, "did you mean 'hidden_size'?"),
    "steps": (["training.steps=4"], [], 0, "training.steps is 4; the bench leaves out the first 3"),
    "weights": (
        ["checkpoint.initial_load_path=runs/x"],
        ["--ablate"],
        0,
        "checkpoint.initial_load_path is 'runs/x'; the bench checks the loss of untrained weights",
    ),
    "ramp": (
        ["training.batch_ramp_up={start=2,increment=2,samples=8}"],
        [],
        0,
        "set training.batch_ramp_up=null",
    ),
    "rung": (["model.bias=qkv"], ["--ablate"], 0, "cannot take the rung 'parallel block'"),
    "switch": (["model.block=parallel"], ["--ablate"], 0, "leave it out, or measure one case"),
    "target": ([], ["--ablate", "--target", "0.5"], 0, "the MFU of one case: leave them out"),
    "two kinds": ([], ["--ablate", "--bubble"], 0, "more than one is given; each measures"),
    "roof": ([], ["--waterfall", "--roof"], 0, "--roof is given with --waterfall; measure it with"),
    "silence": (
        [],
        ["--without-communication"],
        0,
        "is given without --waterfall, which it checks",
    ),
    "turns": ([], ["--waterfall", "--rounds", "2"], 0, "--rounds is 2 with --waterfall, which is"),
    "no pipeline": ([], ["--bubble"], 0, "only a pipeline has a bubble: set it to 2 or more"),
    "baseline": ([], ["--baseline", "megatron"], 0, "--baseline is 'megatron'; give name=mfu"),
    "roof twice": (
        [],
        ["--roof", "--baseline", "roof=0.5"],
        0,
        "--baseline roof=0.5 is given with --roof, which measures the roof and writes it under",
    ),
    "baseline twice": (
        [],
        ["--baseline", "peer=0.5", "--baseline", "peer=0.6"],
        0,
        "--baseline peer is given twice; a row has one value of each",
    ),
    "folder": ([], ["--output", "DIR"], 0, "is a folder; name a file that rows are appended to"),
    "nameless": ([], ["--baseline", "=0.5"], 0, "--baseline is '=0.5'; give name=mfu"),
    "percent": ([], ["--baseline", "peer=54.4"], 0, "'peer=54.4'; MFU is a fraction above 0"),
    "no number": ([], ["--target", "nan"], 0, "--target is nan; MFU is a fraction above 0"),
    "unwritable": (
        [],
        ["--output", "/proc/rows.jsonl"],
        0,
        "--output /proc/rows.jsonl cannot be written (/proc: No such file or directory); name",
    ),
    "file": ([], ["--output", "DIR/tiny.toml/rows"], 0, "tiny.toml, which is a file; name another"),
}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    settings, more, num_gpus, complaint = REFUSED[name]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.chdir(tmp_path)
    arguments = [part.replace("DIR", str(tmp_path)) for part in more]
    code = run_here(
        monkeypatch, "bench", "step", str(write_tiny(tmp_path)), *flags(settings), *arguments
    )
    assert code == 2
    assert complaint in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"], "nothing was written"


@pytest.mark.usefixtures("nothing_starts")
def test_an_unknown_recipe_is_refused(monkeypatch: Patch, capsys: Capture) -> None:
    assert run_here(monkeypatch, "bench", "step", "recipes/gpt5.toml", "--ablate") == 2
    assert "recipe recipes/gpt5.toml does not exist; give a TOML file" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
def test_a_rank_of_a_launcher_does_not_start_a_bench(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert run_here(monkeypatch, "bench", "step", str(write_tiny(tmp_path))) == 2
    assert "started as a rank by torchrun; it starts its ranks itself" in capsys.readouterr().err


def _rows(
    folder: Path, monkeypatch: Patch, runs: list[dict[str, float]], *more: str
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and rows of the verb whose runs are planted, with these changes."""
    planted = iter(runs)

    def measure(case: Case, _beside: Beside | None) -> Run:
        return planted_run(case, **next(planted))

    monkeypatch.setattr(start, "run_case", measure)
    output = folder / "new folder" / "step.jsonl"
    where = ("--output", str(output), "--commit=0123456789ab")
    code = run_here(monkeypatch, "bench", "step", str(write_tiny(folder)), *where, *more)
    return code, tables.read_rows("step", output.parent) if output.exists() else []


def test_the_row_of_a_case(tmp_path: Path, monkeypatch: Patch) -> None:
    settings = ("--model", "small", "--target", "0.5", "--baseline", "megatron_core=0.544")
    runs = [{"step_s": 0.1}, {"step_s": 0.4}, {"step_s": 0.2}]
    code, rows = _rows(tmp_path, monkeypatch, runs, "--rounds", "3", *settings)
    assert code == 0
    (row,) = rows
    recipe = tmp_path / "tiny.toml"
    assert row["command"] == f"megascale bench step {recipe} --rounds 3 {' '.join(settings)}"
    assert row["case"] == {
        **dict.fromkeys(("tp", "pp", "vp", "dp", "mbs"), 1),
        "model": "small",
        "gbs": 4,
        "seq": 16,
        "block": "serial",
        "attention": "full",
        "recompute": "none",
        "flux": "none",
    }
    assert (row["value"], row["mfu_causal"]) == pytest.approx((0.2, 0.15))
    assert (row["step_s"], row["peak_gb"]) == (0.2, 2.0), "the rank that holds most"
    assert row["host_ms"] == pytest.approx(30.0), "of the slowest host, without its wait for data"
    assert row["lead_ms"] == pytest.approx(5.0), "where the host was least ahead"
    assert row["forms"] == {"gemm_rs m0": "plain", "gemm_rs m1": "plain"}
    assert (row["first_loss"], row["last_loss"]) == pytest.approx((FIRST_LOSS, FIRST_LOSS - 0.04))
    assert row["settings"] == {
        "schedule": "none",
        "share_head": False,
        "join_weight_gradients": 1,
    }
    assert row["baselines"] == {"megatron_core": 0.544}
    assert (row["target"], row["met"]) == ({"op": ">=", "value": 0.5}, False)
    assert (row["commit"], row["dirty"], row["device"]) == ("0123456789ab", False, "cpu")


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        ([{"loss": FIRST_LOSS * 0.99}], "untrained weights must cost 5.55"),
        ([{}, {"norm": 1.01}], "in 'the first round', which has the same mathematics"),
    ],
)
def test_a_wrong_loss_leaves_no_row(
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    runs: list[dict[str, float]],
    complaint: str,
) -> None:
    code, rows = _rows(tmp_path, monkeypatch, runs, "--rounds", str(len(runs)))
    assert (code, rows) == (6, [])
    assert complaint in capsys.readouterr().err


def _bench(folder: Path, *more: str, program: Sequence[str] = ()) -> tuple[int, str, str]:
    """Exit code, output and error output of the verb in `folder`. program: of `started`."""
    arguments = ("bench", "step", str(folder / "tiny.toml"), *more)
    with started(arguments, program, folder) as process:
        return end(process, timeout_s=220.0)


@pytest.mark.full
@pytest.mark.timeout(240)  # beside whatever else is tested
def test_the_ladder_on_two_ranks(tmp_path: Path) -> None:
    write_tiny(tmp_path, TINY.replace("num_layers = 4", "num_layers = 2"))
    code, output, errors = _bench(tmp_path, "--nproc", "2", "--ablate", "--set", PP2)
    assert code == 0, errors
    rows = tables.read_rows("ladder", tmp_path / "benchmarks" / "results")
    names = ["baseline", "parallel block", "sliding window", "PP overlap"]
    names += ["efficient operators", "misc", "LAMB 3x batch"]
    assert [row["case"]["rung"] for row in rows] == names
    assert all(row["value"] > 0 and len(row["losses"]) == 5 for row in rows)
    window, overlap = rows[2], rows[3]
    assert (window["case"]["transfers"], overlap["case"]["transfers"]) == ("coupled", "decoupled")
    assert overlap["losses"] == window["losses"]
    assert window["losses"] != rows[1]["losses"]
    assert rows[5]["losses"] == rows[4]["losses"] == overlap["losses"]
    assert rows[6]["sum_of_gains"] == pytest.approx(rows[6]["value"] - rows[0]["value"])
    printed = output.split("\n\n")[-1]
    assert [line.split("  ")[0] for line in printed.splitlines()[1:10]] == [
        *names[:3],
        "TP overlap",
        "PP overlap",
        "DP overlap",
        "efficient operators",
        "misc",
        "LAMB 3x batch",
    ]
    assert printed.count("not in this layout") == 2


@pytest.mark.full
def test_one_case_and_a_case_that_fails(tmp_path: Path) -> None:
    write_tiny(tmp_path, TINY.replace("num_layers = 4", "num_layers = 1"))
    code, _, errors = _bench(tmp_path, program=FRESH)
    assert code == 0, errors
    output = tmp_path / "benchmarks" / "results" / "step.jsonl"
    (line,) = output.read_text().splitlines()
    row = json.loads(line)
    assert row["step_s"] == statistics.median([row["stats"]["min"], row["stats"]["max"]])
    assert 0.0 < row["host_ms"] <= 1e3 * row["step_s"]
    assert "lead_ms" not in row, "a CPU has done what was launched"
    assert row["peak_gb"] > 0.05
    failing = flags(["optimizer.lr=1e38", "training.nonfinite_policy=stop", TP2])
    code, _, errors = _bench(tmp_path, *failing, "--nproc", "2")
    assert code == 6
    assert re.search("of 2: .*not finite", errors)
    assert output.read_text().splitlines() == [line]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_waterfall_of_a_pipeline_beside_the_step_without_communication(tmp_path: Path) -> None:
    write_tiny(tmp_path, TINY.replace("num_layers = 4", "num_layers = 2"))
    code, output, errors = _bench(
        tmp_path, "--nproc", "2", "--set", PP2, "--waterfall", "--without-communication"
    )
    assert code == 0, errors
    (row,) = tables.read_rows("waterfall", tmp_path / "benchmarks" / "results")
    assert sum(row["ms"].values()) == pytest.approx(row["step_ms"])
    assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert row["value"] == row["shares"]["residual"]
    assert len(row["ranks_ms"]) == len(row["cross_check"]["ranks"]) == 2
    assert row["ms"]["bubble"] > 0
    assert row["details_ms"]["gemm mlp.fc1 backward"] > 0
    printed = output.split("\n")
    assert any(line.startswith("gemm_inefficiency ") for line in printed)
    assert not (tmp_path / "benchmarks" / "results" / "step.jsonl").exists()


@pytest.mark.full
def test_the_roof_is_measured_before_and_after_the_steps(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """By a rank of its own, whose command says for how long: here, shorter than usual."""
    monkeypatch.setattr(start, "Beside", partial(Beside, warm_up_s=0.2, round_s=0.1))
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny(tmp_path, TINY.replace("num_layers = 4", "num_layers = 1"))
    assert run_here(monkeypatch, "bench", "step", str(recipe), "--roof") == 0
    (row,) = tables.read_rows("step", tmp_path / "benchmarks" / "results")
    assert set(row["roof"]) == {"before", "after"}
    assert row["baselines"]["roof"] == pytest.approx(statistics.fmean(row["roof"].values()))
    assert row["baselines"]["roof"] > row["value"], "a step does more than its products"


def test_a_rank_of_the_bench_is_not_started_by_hand(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = write_tiny(tmp_path)
    assert run_here(monkeypatch, "bench", "rank", str(recipe), "--silent") == 2
    assert "start `megascale bench step RECIPE`" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert run_here(monkeypatch, "bench", "rank", str(recipe), "--silent") == 2
    assert "computes nothing that may be kept: set checkpoint.enable=false" in (
        capsys.readouterr().err
    )


def test_the_old_way_to_start_it_still_does() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--ablate" in result.stdout


@pytest.mark.full
def test_a_stop_in_the_middle_ends_the_ladder_with_its_table(tmp_path: Path) -> None:
    recipe = write_tiny(tmp_path, TINY.replace("steps = 5", "steps = 1000000"))
    output = tmp_path / "rows.jsonl"
    arguments = ("bench", "step", str(recipe), "--ablate", "--output", str(output))
    with started(arguments) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step: 2 "):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGTERM)
        code, printed, errors = end(process)
    assert code == 5, errors
    assert re.search(r"error: the run was stopped after \d+ of 1000000 steps: no row", errors)
    assert "parallel block, round" not in printed, "the next rung was not started"
    assert re.search(r"^parallel block +3\.1 +no row: not reached$", printed, re.MULTILINE)
    assert not output.exists()
