"""GPUs by a stand-in for NVML, read in the probe's process; real ones by the tests marked gpu."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.selfcheck.gpus import judge_gpus, num_gpus
from megascale.cluster.selfcheck.process import Job, Outcome, run_in_turn
from tools.blocks import ROOT

HEALTHY = {
    "uuid": "GPU-1",
    "ecc": 0,
    "remapped": [1, 0, 0, 0],
    "temperature": 40,
    "slowdown": 90,
    "throttle": 0x01 | 0x04,  # idle, power cap: no illness
    "width": 16,
    "width_most": 16,
    "links": 18,
}


@pytest.fixture
def probe(tmp_path: Path) -> Any:
    """Reads GPUs that say what they are told to."""
    (tmp_path / "pynvml.py").write_text(Path(__file__).with_name("fake_pynvml.py").read_text())
    (tmp_path / "dev").mkdir()

    def read(
        *gpus: dict[str, Any], init: str = "ok", files: int | None = None, limit_s: float = 30.0
    ) -> Outcome:
        (tmp_path / "gpus.json").write_text(json.dumps({"init": init, "gpus": gpus}))
        for number in range(len(gpus) if files is None else files):
            (tmp_path / "dev" / f"nvidia{number}").touch()
        job = Job("gpus", {"root": str(tmp_path)}, limit_s)
        module = "megascale.cluster.selfcheck.probe"
        path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        return run_in_turn(module, [job], time.monotonic() + 60.0, path)["gpus"]

    return read


def test_healthy_gpus_pass(probe: Any) -> None:
    outcome = probe(HEALTHY, HEALTHY)
    check = judge_gpus(outcome, 2)
    assert check.ok, check.reason
    assert (check.value, check.expected) == (2.0, 2.0)
    assert check.detail["driver"] == "580.1"
    assert num_gpus(outcome) == 2


def test_what_a_gpu_does_not_tell_is_no_illness(probe: Any) -> None:
    assert judge_gpus(probe({}), None).ok


def test_a_node_without_gpus_does_not_pass_it_does_not_apply(probe: Any) -> None:
    check = judge_gpus(probe(init="fail", files=0), None)
    assert check.ok is None
    assert "no GPU" in check.reason
    assert "Driver Not Loaded" in check.reason


@pytest.mark.parametrize(
    ("ill", "says"),
    [
        ({"ecc": 3}, "3 uncorrected memory errors"),
        ({"remapped": [1, 1, 1, 0]}, "waits for a reset"),
        ({"remapped": [1, 1, 0, 1]}, "could not be remapped"),
        ({"throttle": 0x40}, "slowed down by hw_thermal"),
        ({"throttle": 0x80}, "slowed down by hw_power_brake"),
        ({"temperature": 91}, "91 C, slows down at 90"),
        ({"width": 8}, "PCIe x8 of x16"),
        ({"down": 4}, "17 NVLinks up, others of this node have 18"),
        ({"lost": True}, "GPU 1 is lost"),
    ],
)
def test_an_ill_gpu_fails_and_is_named(probe: Any, ill: dict[str, Any], says: str) -> None:
    check = judge_gpus(probe(HEALTHY, {**HEALTHY, **ill}), None)
    assert check.ok is False
    assert says in check.reason
    assert "GPU 1" in check.reason
    assert "GPU 0" not in check.reason


def test_a_lost_gpu_is_missed(probe: Any) -> None:
    assert judge_gpus(probe(HEALTHY, files=2), None).reason.startswith("1 of 2 GPUs answer")
    check = judge_gpus(probe(HEALTHY), 8)
    assert check.ok is False
    assert check.reason.startswith("1 of 8 GPUs answer")


def test_a_driver_that_is_not_there_for_gpus_that_are(probe: Any) -> None:
    check = judge_gpus(probe(init="fail", files=8), None)
    assert check.ok is False
    assert "0 of 8 GPUs answer (NVML does not start (Driver Not Loaded))" in check.reason


@pytest.mark.parametrize(
    ("gpus", "init", "at"),
    [([], "hang", "NVML's start"), ([HEALTHY, {**HEALTHY, "ecc": "hang"}], "ok", "GPU 1")],
)
def test_a_driver_that_hangs_fails_the_check_in_time(
    probe: Any, gpus: list[dict[str, Any]], init: str, at: str
) -> None:
    outcome = probe(*gpus, init=init, limit_s=4.0)
    check = judge_gpus(outcome, None)
    assert check.ok is False
    assert f"at {at}; its processes were killed" in check.reason
    assert num_gpus(outcome) == 0
