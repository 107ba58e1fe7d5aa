"""Whole runs on this machine: all checks pass, and each fault on purpose fails exactly its check.

The speeds that a run compares with are learned by one clean run before.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.selfcheck import plan, run_node_checks
from megascale.cluster.selfcheck.pairs import Meeting
from megascale.env import free_port
from tests.cluster.selfcheck.alive import children
from tests.shared import shared_folder

LIGHT_S, FULL_S = 100.0, 200.0  # deadlines: an idle node needs 3 and 7 s, a crowded one far more


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder in which this node has passed, and what came of that."""

    def make(folder: Path) -> None:
        folder.mkdir()
        report = run_node_checks("full", FULL_S, folder)
        assert report["ok"], report

    once = shared_folder(tmp_path_factory, "selfcheck-learned", make)
    return Path(shutil.copytree(once, tmp_path_factory.mktemp("learned") / "run"))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert children() == []


def verdicts(report: dict[str, Any]) -> dict[str, bool | None]:
    return {check["name"]: check["ok"] for check in report["checks"]}


def failed(report: dict[str, Any]) -> set[str]:
    return {name for name, ok in verdicts(report).items() if ok is False}


def on_gpus(report: dict[str, Any]) -> bool:
    return verdicts(report)["gpus"] is not None


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_healthy_node_is_fit_and_says_what_did_not_apply(learned: Path) -> None:
    report = run_node_checks("full", FULL_S, learned)
    assert report["ok"], report
    got = verdicts(report)
    assert list(got) == list(plan.FULL)
    absent = {name for name, ok in got.items() if ok is None}
    assert set(report["not_applicable"]) == absent
    assert all(check["reason"] for check in report["checks"] if check["ok"] is None)
    if not on_gpus(report):
        assert absent == {"gpus", "mesh", "rdma"}
    for check in report["checks"]:
        if check["name"] in ("memory", "gemm", "all_to_all"):
            assert check["value"] > 0
            assert check["expected"] > 0, "the clean run before it taught this"


# Faults of several checks in one run: each must fail its own, and nothing else may.
LIGHT_FAULTS = [
    ("host,gemm:0.5,crash:replay", {"host", "gemm", "replay"}),
    ("gpus,memory:0.5,replay:flip", {"gpus", "memory", "replay"}),
    ("hang:memory,crash:gemm", {"memory", "gemm"}),
    ("hang:host,gemm", {"host", "gemm"}),
]
FULL_FAULTS = [
    ("mesh,rdma,hang:all_to_all", {"mesh", "rdma", "all_to_all"}),
    ("all_to_all:0.01,replay", {"all_to_all", "replay"}),
    ("crash:all_to_all,memory", {"all_to_all", "memory"}),
]


def short_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("host", "memory"):
        monkeypatch.setitem(plan.LIMITS_S, name, 10.0)  # a busy machine needs 4 for a sound one
    monkeypatch.setitem(plan.LIMITS_S, "all_to_all", 20.0)


def check_failures(report: dict[str, Any], fails: set[str]) -> None:
    """Exactly these. The memory of a machine that others share may be slower than it was when the
    run folder learned its speed: where no fault was planted in it, it may fail too."""
    allowed = {"memory"} - fails
    assert failed(report) - allowed == fails, report["checks"]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "fails"), LIGHT_FAULTS)
def test_faults_of_the_light_checks_fail_exactly_theirs(
    learned: Path, monkeypatch: pytest.MonkeyPatch, fault: str, fails: set[str]
) -> None:
    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", fault)
    short_hangs(monkeypatch)
    report = run_node_checks("light", LIGHT_S, learned)
    check_failures(report, fails)
    assert not report["ok"]
    assert list(verdicts(report)) == list(plan.LIGHT)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("fault", "fails"), FULL_FAULTS)
def test_faults_of_the_full_checks_fail_exactly_theirs(
    learned: Path, monkeypatch: pytest.MonkeyPatch, fault: str, fails: set[str]
) -> None:
    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", fault)
    short_hangs(monkeypatch)
    report = run_node_checks("full", FULL_S, learned)
    check_failures(report, fails)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_faulty_run_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", "gemm:0.5")
    first = run_node_checks("light", LIGHT_S, tmp_path)
    assert first["ok"], "nothing to compare with yet"
    monkeypatch.delenv("MEGASCALE_SELFCHECK_FAULT")
    text = "".join(path.read_text() for path in (tmp_path / "selfcheck").glob("*.json"))
    assert "memory_copy_gb_s" in text
    assert "gemm" not in text


@pytest.mark.full
@pytest.mark.timeout(300)
def test_corruption_is_told_as_such(learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", "replay:flip")
    report = run_node_checks("light", LIGHT_S, learned)
    (replay,) = (check for check in report["checks"] if check["name"] == "replay")
    assert replay["reason"].startswith("silent corruption: ")


@pytest.mark.parametrize(
    ("deadline_s", "fault"), [(2.5, "hang:host,hang:memory"), (0.6, ""), (0.0, ""), (-5.0, "")]
)
def test_the_deadline_holds_whatever_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float, fault: str
) -> None:
    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", fault)
    start = time.monotonic()
    report = run_node_checks("full", deadline_s, tmp_path)
    assert time.monotonic() - start < max(deadline_s, 0.0) + 1.0
    assert not report["ok"]
    assert list(verdicts(report)) == list(plan.FULL)
    assert all(check["reason"] for check in report["checks"] if check["ok"] is not True)


@pytest.mark.parametrize(
    ("arguments", "fault", "says"),
    [
        (("heavy", 60.0, Path("r")), "", "level 'heavy'; legal: light, full"),
        (("light", 60.0, Path("r"), Path("/none.toml")), "", "/none.toml cannot be read"),
        (("light", 60.0, Path("r"), None, ["b"]), "", "expected PEER@HOST:PORT/RANK"),
        (("light", 60.0, Path("r")), "gemm:much", "expected CHECK, CHECK:FACTOR"),
        (("light", 60.0, Path("r")), "gem:0.5", "names 'gem'; checks: host, gpus"),
        (("light", 60.0, Path("r")), "gemm:flip", "only replay can flip"),
        (("light", 60.0, Path("r")), "host:0.5", "it is no speed"),
        (("light", 60.0, 5), "", "TypeError"),
    ],
)
def test_it_never_raises_and_a_node_that_cannot_be_checked_failed(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], fault: str, says: str
) -> None:
    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", fault)
    report = run_node_checks(*arguments)
    assert report["ok"] is False
    (check,) = report["checks"]
    assert check["name"] == "setup"
    assert says in check["reason"]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_run_folder_that_cannot_be_written_fails_the_host_alone(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    report = run_node_checks("light", LIGHT_S, folder)
    assert failed(report) == {"host"}
    assert "could not be kept" in report["note"]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_meetings_are_told_apart_from_the_nodes_own_checks(
    learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = str(Meeting("node1", "127.0.0.1", free_port(), 1))  # nobody listens there
    report = run_node_checks("light", 40.0, learned, None, [alone])
    assert report["ok"], "this node did nothing wrong"
    assert report["pairs"] == {"node1": False}
    assert verdicts(report)["neighbours:node1"] is False
    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", "host")
    report = run_node_checks("light", 60.0, learned, None, [alone])
    assert verdicts(report)["neighbours:node1"] is None, "a bad node meets nobody"
    assert report["pairs"] == {"node1": False}


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_gpus_pass_and_each_is_measured(learned: Path) -> None:
    import torch

    report = run_node_checks("full", 250.0, learned)
    assert report["ok"], report
    checks = {check["name"]: check for check in report["checks"]}
    count = torch.cuda.device_count()
    assert checks["gpus"]["value"] >= count
    assert len(checks["gemm"]["detail"]) == len(checks["replay"]["detail"]) == count + 1
    assert len(checks["mesh"]["detail"]) >= 2 * count + count * (count - 1)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_gpu_that_flips_a_bit_is_named(learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("MEGASCALE_SELFCHECK_FAULT", "replay:flip,mesh:0.3")
    report = run_node_checks("full", 250.0, learned)
    assert failed(report) == {"replay", "mesh"}
    (replay,) = (check for check in report["checks"] if check["name"] == "replay")
    assert f"cuda:{torch.cuda.device_count() - 1} gave two results" in replay["reason"]
