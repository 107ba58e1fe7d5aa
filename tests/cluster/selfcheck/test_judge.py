"""Verdicts from figures: what fails, by how much, against what; and what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.selfcheck.check import Check
from megascale.cluster.selfcheck.expected import Expected, load_expected
from megascale.cluster.selfcheck.judge import (
    judge_host,
    judge_replay,
    judge_speeds,
    merge_speeds,
)
from megascale.cluster.selfcheck.learned import Learned
from megascale.cluster.selfcheck.process import Outcome
from megascale.cluster.selfcheck.run import _Run as Run
from megascale.errors import ConfigError

EXPECTED = Expected({"gemm": 0.2}, {}, {"H": {"gemm_bf16_tflops": 680.0}})


def rates(*values: float, kind: str = "H", **extra: Any) -> Outcome:
    found = [
        {"at": f"cuda:{i}", "class": "gemm_bf16_tflops", "kind": kind, "value": value, **extra}
        for i, value in enumerate(values)
    ]
    return Outcome(1.5, {"rates": found, "unit": "TFLOP/s"})


def judge(outcome: Outcome, learned: float | None = None, factor: float = 1.0) -> Check:
    return judge_speeds("gemm", outcome, EXPECTED, lambda _key: learned, factor=factor)


def test_a_speed_is_held_to_the_table_with_its_tolerance() -> None:
    good = judge(rates(545.0, 700.0))
    assert good.ok
    assert (good.value, good.expected, good.unit) == (545.0, 680.0, "TFLOP/s")  # of the worst
    bad = judge(rates(543.0, 700.0))
    assert bad.ok is False
    assert bad.speed_only
    assert bad.reason == "slower by more than 20%: cuda:0 543 TFLOP/s, the table has 680"


def test_a_speed_is_held_to_what_was_learned() -> None:
    assert judge(rates(100.0, kind="other")).ok
    assert judge(rates(81.0, kind="other"), learned=100.0).ok
    assert judge(rates(79.0, kind="other"), learned=100.0).ok is False
    assert judge(rates(100.0, kind="other"), learned=100.0, factor=0.5).value == 50.0


def test_a_device_is_held_to_the_others_of_its_kind() -> None:
    bad = judge(rates(500.0, 500.0, 380.0, 500.0, kind="other"))
    assert bad.ok is False
    assert "cuda:2 380 TFLOP/s, the median here is 500" in bad.reason
    assert judge(rates(500.0, 380.0, kind="other")).ok, "of two, none is the odd one"


def test_a_line_rate_counts() -> None:
    assert judge(rates(300.0, kind="port", expected=400.0)).ok is False
    assert judge(rates(330.0, kind="port", expected=400.0)).ok


def test_nothing_measured_and_no_answer_are_failures() -> None:
    assert judge(rates()).ok is False
    assert judge(Outcome(3.0, None, "hung", "no answer")).reason == "no answer"


def test_a_quota_that_stops_the_process_is_a_failure() -> None:
    outcome = rates(700.0)
    assert outcome.result is not None
    outcome.result["throttled_share"] = 0.9
    assert judge(outcome).ok is False
    assert judge(outcome).reason == "a CPU quota stopped it in 90% of its periods"


def test_the_better_of_two_tries_counts_device_by_device() -> None:
    merged = merge_speeds(rates(400.0, 700.0), rates(690.0, 410.0))
    assert [rate["value"] for rate in (merged.result or {})["rates"]] == [690.0, 700.0]
    assert judge(merged).ok
    assert merge_speeds(rates(1.0), Outcome(1.0, None, "hung", "x")).kind == "hung"


def hashes(*runs: tuple[str, str], kind: str = "H") -> Outcome:
    found = [{"at": f"cuda:{i}", "kind": kind, "runs": list(pair)} for i, pair in enumerate(runs)]
    return Outcome(1.0, {"hashes": found})


def test_a_device_that_differs_from_its_kind_is_corrupt() -> None:
    check = judge_replay(hashes(("a", "a"), ("a", "a"), ("b", "b")), lambda _kind: {})
    assert check.ok is False
    assert check.reason.startswith("silent corruption: cuda:2 gave another result")
    assert "cuda:0" not in check.reason
    assert judge_replay(hashes(("a", "a"), ("a", "a")), lambda _kind: {}).ok


def test_a_device_that_differs_from_itself_is_corrupt() -> None:
    check = judge_replay(hashes(("a", "b")), lambda _kind: {})
    assert check.reason == "silent corruption: cuda:0 gave two results for the same input"


def test_a_device_is_compared_with_other_nodes() -> None:
    known = {"n1": "a", "n2": "a"}
    assert judge_replay(hashes(("a", "a")), lambda _kind: known).ok
    assert judge_replay(hashes(("b", "b")), lambda _kind: known).ok is False
    # the others disagree: the majority counts, whoever was first
    assert judge_replay(hashes(("a", "a")), lambda _kind: {"n1": "b", "n2": "a"}).ok


def test_without_a_majority_nobody_passes() -> None:
    check = judge_replay(hashes(("a", "a"), ("b", "b")), lambda _kind: {})
    assert check.ok is False
    assert "cuda:0" in check.reason
    assert "cuda:1" in check.reason
    assert judge_replay(hashes(("a", "a")), lambda _kind: {"n1": "b"}).ok is False


def test_kinds_are_compared_apart() -> None:
    two = {"hashes": [{"at": "cpu", "kind": "c", "runs": ["x", "x"]}]}
    assert judge_replay(hashes(("a", "a")), lambda kind: {"H": {}, "c": {}}[kind]).ok
    assert judge_replay(Outcome(1.0, two), lambda kind: {"c": {"n": "x"}}[kind]).ok


def test_the_host_tells_all_its_failures() -> None:
    check = judge_host(Outcome(0.1, {"failures": ["no room", "no time"], "notes": {"cpus": 2}}))
    assert (check.ok, check.value, check.reason) == (False, 2.0, "no room; no time")
    assert check.detail == {"cpus": 2}


# ---------------------------------------------------------------- the run folder


def learn(folder: Path, node: str, speed: float) -> None:
    learned = Learned(folder, node)
    learned.keep_speed("gemm/x/H", speed)
    learned.save()


def test_the_first_pass_of_a_node_is_kept_and_does_not_decay(tmp_path: Path) -> None:
    learn(tmp_path, "a", 100.0)
    learn(tmp_path, "a", 85.0)
    assert Learned(tmp_path, "a").speed("gemm/x/H") == 100.0
    assert Learned(tmp_path, "a").speed("gemm/y/H") is None


def test_a_node_is_held_to_the_median_of_all(tmp_path: Path) -> None:
    for node, speed in (("slow", 50.0), ("b", 100.0), ("c", 102.0)):
        learn(tmp_path, node, speed)
    assert Learned(tmp_path, "slow").speed("gemm/x/H") == 100.0


def test_hashes_are_the_other_nodes_newest(tmp_path: Path) -> None:
    for digest in ("old", "new"):
        learned = Learned(tmp_path, "a/../b")  # a node's name is no path
        learned.keep_hash("H", digest)
        learned.save()
    assert list(Learned(tmp_path, "c").hashes("H").values()) == ["new"]
    assert Learned(tmp_path, "a/../b").hashes("H") == {}
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "selfcheck"]


def test_torn_files_teach_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "selfcheck"
    folder.mkdir()
    (folder / "torn.json").write_text('{"speeds": {"gemm/x/H": 1')
    (folder / "foreign.json").write_text(json.dumps([1]))
    (folder / "odd.json").write_text(json.dumps({"speeds": [1], "hashes": None, "gpus": "8"}))
    assert Learned(tmp_path, "a").speed("gemm/x/H") is None
    assert Learned(tmp_path, "odd").num_gpus is None


# ---------------------------------------------------------------- the table


def test_the_table_has_h200_and_a_file_is_laid_over_it(tmp_path: Path) -> None:
    own = load_expected()
    assert own.speed("NVIDIA H200", "copy_peer_gb_s") == 371.0
    assert own.speed("NVIDIA B900", "copy_peer_gb_s") is None
    file = tmp_path / "mine.toml"
    file.write_text(
        "[tolerance]\ngemm = 0.1\n[host]\nmost_load_per_cpu = 4\n"
        '[devices."NVIDIA H200"]\ngemm_bf16_tflops = 700\n[devices.New]\ngemm_bf16_tflops = 9\n'
    )
    laid = load_expected(file)
    assert laid.tolerance == {**own.tolerance, "gemm": 0.1}
    assert laid.host == {**own.host, "most_load_per_cpu": 4}
    assert laid.speed("NVIDIA H200", "gemm_bf16_tflops") == 700
    assert laid.speed("NVIDIA H200", "copy_peer_gb_s") == 371.0
    assert laid.speed("New", "gemm_bf16_tflops") == 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tolerances]\ngemm = 0.1", "legal sections: tolerance, host, devices"),
        ("[tolerance]\ngem = 0.1", "tolerance.gem is not known; legal in tolerance: gemm"),
        ("[tolerance]\ngemm = 1.5", "must lie between 0 and 1"),
        ("[tolerance]\ngemm = true", "must be a number above 0"),
        ("[host]\nmost_load_per_cpu = 'x'", "must be a number above 0"),
        ("[devices]\nH = 3", r'write \[devices."H"\]'),
        ("[devices.H]\nx = -1", "must be a number above 0"),
        ("tolerance = 3", "legal sections"),
        ("x", "is no TOML"),
    ],
)
def test_a_table_that_says_nothing_legal_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_expected(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_expected(tmp_path / "none.toml")


# ---------------------------------------------------------------- what torch sees


@pytest.mark.parametrize(
    ("seen", "chosen", "ok"),
    [(8, False, True), (4, False, False), (4, True, True), (0, True, False)],
)
def test_gpus_that_torch_does_not_see_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: int, chosen: bool, ok: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    gemm = rates(700.0)
    assert gemm.result is not None
    gemm.result["gpus"] = seen
    nvml = Outcome(0.1, {"devices": [{}] * 8, "device_files": 8})
    learned = Learned(tmp_path, "a")
    run = Run("light", 0.0, tmp_path, EXPECTED, learned, {}, "c", {"gpus": nvml, "gemm": gemm})
    check = run.judge("gemm")
    assert check.ok is ok
    assert ok or f"torch sees {seen} of 8 GPUs" in check.reason
