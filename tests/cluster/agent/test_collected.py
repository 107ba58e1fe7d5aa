"""What a node finds out reaches the driver: causes, steps, incidents, storms, stacks, checks."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.agent import dump
from megascale.cluster.messages import DumpStacks, Noticed, RunSelfCheck, StepSums
from tests.cluster.agent.conftest import Ordered, StartAgent, gone_within, of_test
from tests.cluster.agent.fake_driver import FakeDriver
from tests.cluster.agent.programs import SLEEPS

pytestmark = pytest.mark.full
PY_SPY = shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").exists()

FAILS_AS_TRAIN_DOES = """
import os, sys, time
from pathlib import Path
from megascale.train.launch import record_failure
rank = int(os.environ["RANK"])
logs = Path(sys.argv[0]).parent / "logs"
if rank == 0:
    time.sleep(0.2)
    record_failure(logs, 0, "RuntimeError: Connection closed by peer [127.0.0.1]:5812", 1)
    time.sleep(600)  # and hangs while it ends
record_failure(logs, 1, "NumericalError: the gradient of x is not finite", 6)
sys.exit(6)
"""


def test_the_cause_and_who_was_first(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    driver.order(ordered(FAILS_AS_TRAIN_DOES, num_ranks=2))
    dead = driver.rank(1, state="exited").failure
    assert dead is not None
    assert (dead.kind, dead.exit_code) == ("numerical", 6)
    hung = driver.wait(lambda: driver.rank(0).failure, 30.0, "failure of a rank that still runs")
    assert hung.kind == "network"
    assert driver.rank(0).state == "starting"
    driver.wait(lambda: driver.beats[-1].first_failed == 1, 30.0, "first_failed")


def test_an_error_of_an_epoch_before_is_not_told_again(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    old = {"time_ns": 1, "message": "old", "exit_code": 1}
    (tmp_path / "logs" / "error-rank00000.json").write_text(json.dumps(old))
    (tmp_path / "logs" / "rank00000.log").write_text("MemoryError\n")
    start_agent()
    driver.order(ordered("raise SystemExit(3)"))
    failure = driver.rank(0, state="exited").failure
    assert failure is not None
    assert (failure.kind, failure.exit_code, failure.rule) == ("exit", 3, None)


def test_a_traceback_in_the_log_is_the_cause(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    driver.order(ordered("x = {}\nx['missing']"))
    failure = driver.rank(0, state="exited").failure
    assert failure is not None
    assert (failure.kind, failure.rule) == ("exception", "python_exception")
    assert failure.message == "KeyError: 'missing'"
    assert failure.exit_code == 1
    driver.wait(lambda: any(beat.log for beat in driver.beats), 30.0, "log match")
    (match,) = next(beat.log for beat in driver.beats if beat.log)
    assert (match.rank, match.rule, match.count) == (0, "python_exception", 1)


STEPS = """
import os, sys, time
from pathlib import Path
from megascale.events import Incident, Step, Sums
from megascale.telemetry.writer import LineWriter, line_file
with LineWriter(line_file(Path(sys.argv[0]).parent, 0), flush_interval_s=0.05) as write:
    for step in range(1, 31):
        write(Sums(rank=0, step=step, sums={"forward": {"total_ns": step, "count": 1}}))
        write(Step(rank=0, step=step, t0_ns=0, dur_ns=2 * step, clock="host", sampled=False))
        time.sleep(0.02)
    write(Incident(rank=0, name="checkpoint", t_ns=1, step=30, detail={"path": "step-30"}))
time.sleep(600)
"""


def test_every_step_arrives_once_and_in_order(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    driver.order(ordered(STEPS))

    def told(kind: str) -> list[Any]:
        return [found for beat in driver.beats for r in beat.ranks for found in getattr(r, kind)]

    driver.wait(lambda: told("noticed"), 30.0, "noticed checkpoint")
    steps = [
        StepSums(step=step, total_ns=2 * step, phases={"forward": step}) for step in range(1, 31)
    ]
    assert told("steps") == steps
    assert told("noticed") == [Noticed(name="checkpoint", step=30, detail={"path": "step-30"})]


STORM = """
import sys
line = "ConnectionResetError: [Errno 104] Connection reset by peer\\n"
for _ in range(200):
    sys.stdout.write(line * 5000)
sys.stdout.flush()
sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
"""


def test_a_million_lines_hold_up_no_beat_and_hide_no_cause(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    driver.order(ordered(STORM))
    driver.rank(0, state="exited", timeout_s=30.0)
    assert (tmp_path / "logs" / "rank00000.log").stat().st_size > 50_000_000
    matches = [match for beat in driver.beats for match in beat.log]
    assert {match.rule for match in matches} <= {"connection", "cuda_out_of_memory"}
    assert sum(match.count for match in matches) < 5_000
    gaps_s = [b - a for a, b in zip(driver.arrivals_s, driver.arrivals_s[1:], strict=False)]
    assert max(gaps_s) < 3.0
    memory = Path(f"/proc/{agent.pid}/status").read_text()
    peak_kb = next(int(row.split()[1]) for row in memory.splitlines() if row.startswith("VmHWM"))
    assert peak_kb < 200_000


WAITS = """
import time
def waits_here():
    time.sleep(600)
open(__file__ + ".on", "w").close()
waits_here()
"""


@pytest.mark.skipif(not PY_SPY, reason="py-spy is not installed")
def test_stacks_of_a_rank_and_its_recorder(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    start_agent()
    assert driver.result_of(driver.order(ordered(WAITS, num_ranks=2))).ok
    driver.wait(lambda: list(tmp_path.glob("*.on")), 30.0, "rank")
    (tmp_path / "logs" / "flight_recorder_rank_0.json").write_text('{"entries": []}')
    (tmp_path / "logs" / "flight_recorder_rank_1").write_bytes(b"a pickle")
    result = driver.result_of(driver.order(DumpStacks(ranks=[0, 9])))
    assert result.ok, result.reason
    assert list(result.detail["stacks"]) == ["0"]
    frames = re.findall(r"^    (\S+) \(", result.detail["stacks"]["0"], re.MULTILINE)
    assert frames == ["waits_here", "<module>"]
    assert result.detail["missing"] == {"9": "does not run on this node"}
    (recorder,) = result.detail["recorders"]["0"]
    assert recorder["text"] == '{"entries": []}'


def test_a_dump_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = 'Thread 1 (idle): "worker"\n' + "    work (a.py:1)\n" * 100
    main = 'Thread 2 (idle): "MainThread"\n    wait (b.py:2)\n'
    monkeypatch.setattr(dump, "stacks", lambda _pid, _until: "Process 9: x\n" + worker * 100 + main)
    found = dump.dump(dict.fromkeys(range(64), (1, tmp_path)))
    assert len(found["stacks"]) == 64
    assert found["stacks"]["63"].startswith("Process 9: x\n" + main + worker)
    assert found["stacks"]["63"].endswith("\n(cut)\n")
    assert len(json.dumps(found)) < 1.1 * dump.RESULT_BYTES


def test_no_stacks_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = dump.dump({0: (2**22 + 1, tmp_path)})
    assert found["stacks"] == {}
    assert "py-spy" in found["missing"]["0"]
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _name: str(slow))
    monkeypatch.setattr(dump, "DEADLINE_S", 0.2)
    began_s = time.monotonic()
    found = dump.dump(dict.fromkeys(range(3 * dump.AT_ONCE), (1, tmp_path)))
    assert time.monotonic() - began_s < 2.0, "one deadline for all of a node"
    assert found["missing"]["0"] == "py-spy did not end in 0.2 s"
    assert found["missing"][str(3 * dump.AT_ONCE - 1)].startswith("no time was left")


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose sitecustomize puts other self-checks in the place of ours."""
    folder = tmp_path / "checks"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys, types\n"
        "from pathlib import Path\n"
        "found = types.ModuleType('megascale.cluster.selfcheck')\n"
        "exec((Path(__file__).parent / 'checks.py').read_text(), found.__dict__)\n"
        "sys.modules['megascale.cluster.selfcheck'] = found\n"
    )
    return folder


@pytest.mark.parametrize(
    ("code", "ok", "detail", "reason"),
    [
        ("return {'ok': True, 'got': [level, deadline_s]}", True, ["light", 1.0], ""),
        ("return {'ok': False, 'got': [str(run_dir.is_dir())]}", False, ["True"], ""),
        ("raise ValueError('broken')", False, None, "exited 1: .*ValueError: broken"),
        ("import time; time.sleep(600)", False, None, "passed its deadline"),
    ],
)
def test_self_checks_end(
    code: str,
    ok: bool,
    detail: Any,
    reason: str,
    checks: Path,
    driver: FakeDriver,
    start_agent: StartAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (checks / "checks.py").write_text(
        f"def run_node_checks(level, deadline_s, run_dir):\n {code}\n"
    )
    start_agent("--check-margin", "1.0", path=str(checks))
    result = driver.result_of(driver.order(RunSelfCheck(deadline_s=1.0)))
    assert result.ok == ok
    assert result.detail.get("got") == detail
    assert re.search(reason, result.reason, re.DOTALL), result.reason
    driver.wait(lambda: driver.beats and driver.beats[-1].done == 1, 30.0, "done")


def test_an_agent_that_is_killed_during_a_self_check_leaves_none(
    checks: Path, driver: FakeDriver, start_agent: StartAgent, tmp_path: Path
) -> None:
    (checks / "checks.py").write_text("import time\ndef run_node_checks(*_):\n  time.sleep(600)\n")
    agent = start_agent(path=str(checks))
    driver.order(RunSelfCheck(deadline_s=500.0))
    driver.wait(lambda: len(of_test(tmp_path)) >= 3, 30.0, "self-check")
    time.sleep(0.5)
    agent.kill()
    agent.wait()
    gone_within(tmp_path, 10.0)


def test_ranks_start_beside_what_an_agent_does(
    checks: Path, driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    (checks / "checks.py").write_text("import time\ndef run_node_checks(*_):\n  time.sleep(600)\n")
    start_agent(path=str(checks))
    driver.order(RunSelfCheck(deadline_s=500.0))
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
