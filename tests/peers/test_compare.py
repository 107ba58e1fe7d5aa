"""The comparison with planted runs: order, budget, failures, rows, commands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import compare
from benchmarks.peers.cases import CASES, PEERS, Peer, Setup, checked_case
from benchmarks.peers.compare import main
from benchmarks.peers.options import llama_block, shape
from benchmarks.peers.result import Result, expected_titan_loss
from benchmarks.peers.runs import Failed, OutOfMemory, run_peer
from benchmarks.peers.turns import Budget, Found, Runners, measure
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run
from megascale.units import flops_per_token, mfu
from tests.train.bench.planted import planted_run
from tools.tables import read_rows

SYSTEMS = ["megascale", "megatron", "titan"]
CPU = ["--set", "training.device=cpu"]


class Planted:
    """Runs that were never made, and the order in which they were asked for."""

    def __init__(
        self,
        *,
        fails: str = "",
        fits: int = 0,
        too_large: Sequence[int] = (),
        step_s: float = 2.0,
    ) -> None:
        """fits: so many runs of peers do not fit into memory; too_large: the numbers of others."""
        self.asked: list[str] = []
        self.more: list[tuple[str, ...]] = []
        self._fails, self._step_s = fails, step_s
        self._too_large = {*range(1, fits + 1), *too_large}

    @property
    def runners(self) -> Runners:
        return Runners(self.ours, self.peer)

    def ours(self, case: Case, limit_s: float) -> Run:
        self.asked.append("megascale")
        model = case.config.model
        loss = math.log(model.vocab) + model.hidden_size * model.init_std**2 / 2
        return planted_run(case, step_s=1.0, loss=loss)

    def peer(self, peer: Peer, case: Case, more: Sequence[str], limit_s: float) -> Result:
        name = next(name for name, one in PEERS.items() if one is peer)
        self.asked.append(name)
        self.more.append(tuple(more))
        if name == self._fails:
            raise Failed(f"{peer.title} ended with code 1\n    traceback")
        if len(self.more) in self._too_large:
            raise OutOfMemory(f"{peer.title} was out of memory")
        system = "torchtitan" if "titan" in name else "megatron_core"
        steps = [9.0] * 3 + [self._step_s] * (case.config.training.steps - 4) + [9.0]
        settings = {"recompute_layers": int(more[1])} if more else {}
        loss = expected_titan_loss(case.config.model)
        return Result(
            system, "1", case.model, steps, self._step_s, [loss], loss, 90.0, 80.0, settings
        )


def setup_7b(steps: int = 6) -> tuple[Setup, Case]:
    setup = CASES["7b-dp2"]
    more = ["training.device=cpu"]
    return setup, checked_case(setup, steps=steps, more=more, num_gpus=0)


def measured(planted: Planted, *, rounds: int = 2, budget: Budget | None = None) -> Found:
    setup, case = setup_7b()
    budget = budget or Budget(0)
    return measure("7b-dp2", setup, case, SYSTEMS, rounds, budget, planted.runners, print)


def test_systems_take_turns() -> None:
    planted = Planted()
    found = measured(planted)
    assert planted.asked == SYSTEMS * 2
    assert len(found.ours) == len(found.peers["megatron"]) == len(found.peers["titan"]) == 2


def test_a_system_that_failed_is_out_and_the_others_go_on() -> None:
    planted = Planted(fails="megatron")
    found = measured(planted)
    assert planted.asked == ["megascale", "megatron", "titan", "megascale", "titan"]
    assert found.failed["megatron"].startswith("Megatron-Core 0.19.2 ended with code 1")
    assert not found.peers["megatron"]


def test_flags_that_save_memory_are_tried_and_kept() -> None:
    planted = Planted(fits=1)
    found = measured(planted)
    assert planted.asked.count("megatron") == 3
    four = ("--recompute-layers", "4")
    assert planted.more[:2] == [(), four]
    assert planted.more.count(four) == 2, "the second round starts with what fitted"
    assert not found.failed


def test_a_row_is_of_runs_of_one_kind(tmp_path: Path) -> None:
    """The second of three rounds needs recomputation: the first is no part of the figure."""
    planted = Planted(too_large=[2])
    said: list[str] = []
    code, _, (row,) = compared(
        tmp_path, planted, "--systems", "megatron", "--rounds", "3", say=said.append
    )
    four = ("--recompute-layers", "4")
    assert planted.more == [(), (), four, four]
    assert code == 0
    assert row["case"]["recompute"] == "4 layers"
    assert (row["stats"]["runs"], row["stats"]["discarded"]) == (2, 1)
    assert any(
        "--recompute-layers 4; 1 run(s) without these flags are disc" in line for line in said
    )
    code, _, (_, row) = compared(
        tmp_path, Planted(too_large=[2, 4]), "--systems", "megatron", "--rounds", "3"
    )
    assert row["case"]["recompute"] == "12 layers"
    assert (row["stats"]["runs"], row["stats"]["discarded"]) == (1, 2)


def test_flags_that_are_known_not_to_fit_are_skipped(tmp_path: Path) -> None:
    planted = Planted()
    compared(tmp_path, planted, "--systems", "megatron,titan", "--save-memory", "1")
    assert planted.more == [("--recompute-layers", "4"), ()] * 2


def test_a_peer_that_never_fits_has_failed() -> None:
    found = measured(Planted(fits=99))
    assert found.failed["megatron"] == (
        "Megatron-Core 0.19.2 was out of memory, with --recompute-layers 12"
    )
    assert found.failed["titan"] == "TorchTitan 0.2.2 was out of memory, with all flags"


def test_runs_that_would_not_end_in_time_are_named_and_not_started() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 5.0
        return now

    planted = Planted()
    found = measured(planted, rounds=1, budget=Budget(70.0, clock))
    assert planted.asked == ["megascale", "megatron"], "titan needs 45 s to start alone"
    assert found.not_started == ["7b-dp2, titan, round 1 of 1"]


def test_the_second_round_knows_what_the_first_took() -> None:
    planted = Planted()
    found = measured(planted, rounds=2, budget=Budget(90.0))
    assert planted.asked == SYSTEMS * 2, "planted runs take no time"
    assert not found.not_started


def compared(
    tmp_path: Path, planted: Planted, *more: str, say: Callable[[str], None] = lambda _: None
) -> tuple[int, Any, list[Any]]:
    output = tmp_path / "step.jsonl"
    arguments = ["7b-dp2", "--steps", "6", "--commit", "abc", "--output", str(output), *CPU, *more]
    code = main(arguments, runners=planted.runners, say=say)
    steps, peers = read_rows("step", tmp_path), read_rows("peers", tmp_path)
    return code, steps, peers


def test_rows_of_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.rows.peak_tflops", lambda name: (100.0, name))
    code, steps, peers = compared(tmp_path, Planted(), "--systems", ",".join(SYSTEMS))
    assert code == 0
    assert [row["case"]["system"] for row in peers] == SYSTEMS
    ours, megatron, titan = peers
    tokens_per_s = 32 * 2048 / 2.0
    gpt = flops_per_token(shape("7b"), 2048)
    llama = flops_per_token(llama_block(shape("7b")), 2048)
    assert megatron["value"] == pytest.approx(mfu(tokens_per_s, gpt, 2, 100.0))
    assert titan["value"] == pytest.approx(mfu(tokens_per_s, llama, 2, 100.0))
    assert (megatron["step_s"], megatron["peak_gb"]) == (2.0, 90.0)
    assert megatron["stats"] == {"runs": 2, "rounds": 4, "min": 2.0, "max": 2.0}
    assert [row["case"]["recompute"] for row in peers] == ["none", "none", "selective"]
    (step,) = steps
    assert step["baselines"] == {"megatron_core": megatron["value"], "torchtitan": titan["value"]}
    assert step["step_s"] == ours["step_s"] == 1.0
    assert step["target"] == {"op": ">=", "value": 0.585}
    assert step["case"]["model"] == "7b"
    assert step["command"] == (
        "python -m benchmarks.peers.compare 7b-dp2 --steps 6 --set training.device=cpu "
        "--systems megascale,megatron,titan"
    )
    keys = {"model", "tp", "pp", "vp", "dp", "mbs", "gbs", "seq", "system", "recompute"}
    assert all(row["case"].keys() == keys for row in peers)


def test_a_target_over_the_better_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.rows.peak_tflops", lambda name: (100.0, name))
    monkeypatch.setitem(CASES, "7b-dp2", replace(CASES["7b-dp2"], target=None, over_better=1.15))
    _, (step,), _ = compared(tmp_path, Planted(), "--systems", ",".join(SYSTEMS))
    better = max(step["baselines"].values())
    assert step["target"]["value"] == pytest.approx(1.15 * better)


def test_a_failure_costs_its_baseline_alone(tmp_path: Path) -> None:
    code, steps, peers = compared(
        tmp_path, Planted(fails="titan"), "--systems", "megascale,titan,megatron"
    )
    assert code == 1
    assert [row["case"]["system"] for row in peers] == ["megascale", "megatron"]
    assert len(steps) == 1


def test_peers_alone_have_no_row_of_step(tmp_path: Path) -> None:
    _, steps, peers = compared(tmp_path, Planted(fits=1), "--systems", "megatron")
    assert not steps
    assert [row["case"]["recompute"] for row in peers] == ["4 layers"]


def test_dry_prints_a_command_for_each_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CASES, "--dry", "--systems", "megascale,megatron,titan-none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * len(CASES)
    assert lines[0] == "# 175b-tp2-mbs1"
    assert lines[1].startswith("megascale train ")
    assert lines[2].startswith("env CUDA_DEVICE_MAX_CONNECTIONS=1 ")
    assert lines[3].endswith("--recompute none")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["7b"], "case '7b' is not known; legal: 175b-tp2-mbs1"),
        (["7b-dp2", "--systems", "megatrom"], "--systems has 'megatrom'; legal: megascale"),
        (["7b-dp2", "--systems", ","], "--systems names none"),
        (["7b-dp2", "--steps", "4"], "training.steps is 4"),
        (["7b-dp2", "--rounds", "0"], "--rounds is 0; give 1 or more"),
        (["7b-dp2", "--budget-s", "-5"], "--budget-s is -5.0; give 0 or more"),
        (["7b-dp2", "--save-memory", "-1"], "--save-memory is -1; give 0 or more"),
        (["7b-dp2", *CPU, "--output", "/proc/rows.jsonl"], "--output /proc/rows.jsonl cannot be"),
        (["7b-dp2"], "this machine has no GPU"),
        (["7b-dp2", *CPU], "Megatron-Core 0.19.2 cannot run here, megatron not installed"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("benchmarks.peers.options.missing", list)
    monkeypatch.setattr(compare, "run_ours", None)
    monkeypatch.setattr(compare, "run_peer", lambda *_, **__: pytest.fail("started"))
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


def run_program(tmp_path: Path, program: str, limit_s: float = 60.0) -> Result:
    """Two ranks of a module of these tests in place of the peer."""
    _, case = setup_7b()
    peer = replace(PEERS["megatron"], program=program)
    return run_peer(peer, case, (), limit_s, logs=tmp_path / "logs")


@pytest.fixture
def planted_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def plant(text: str) -> str:
        (tmp_path / "planted_peer.py").write_text(f"import os, sys, time\n{text}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "planted_peer"

    return plant


@pytest.mark.full
def test_a_peers_result_is_read_and_its_variables_are_set(
    tmp_path: Path, planted_module: Any
) -> None:
    loss = 11.9
    result = Result("megatron_core", "1", "7b", [1.0] * 6, 1.0, [loss], loss, 1.0, 1.0)
    line = json.dumps({"peer": vars(result)})
    program = planted_module(
        'assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"\n'
        'assert os.environ["NCCL_NVLS_ENABLE"] == "0"\n'
        f'if os.environ["RANK"] == "0": print({line!r})'
    )
    assert run_program(tmp_path, program) == result


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "limit_s", "kind", "complaint"),
    [
        ('sys.exit("no such kernel")', 60.0, Failed, r"(?s)ended with code 1.*"),
        ("time.sleep(100)", 6.0, Failed, "did not end in 6 s"),
        (
            'print(\'{"peer_failed": "m", "reason": "out of memory"}\', flush=True); sys.exit(3)',
            60.0,
            OutOfMemory,
            "was out of memory",
        ),
    ],
)
def test_a_peer_that_fails_says_why(
    text: str,
    limit_s: float,
    kind: type[Exception],
    complaint: str,
    tmp_path: Path,
    planted_module: Any,
) -> None:
    with pytest.raises(kind, match=complaint):
        run_program(tmp_path, planted_module(text), limit_s)
