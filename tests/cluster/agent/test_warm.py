"""The pool of warm processes, with a stand-in for what they run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megascale.cluster.agent import warm as pool
from megascale.cluster.agent import warm_calm, warm_process
from megascale.cluster.agent.ledger import PAGE_VARIABLE
from megascale.cluster.agent.proc import marker_of, read_stat
from megascale.cluster.agent.rank_process import Deadlines, RankProcess, RankStatus
from megascale.events import Issued
from tests.cluster.agent.pools import Pool, running


def test_a_ready_one_is_told_who_it_is(one: Pool) -> None:
    one.warm.want("all", 1)
    (pid,) = one.tick()
    member = one.warm.members[0]
    stat = read_stat(pid)
    assert stat is not None
    assert (member.identity, member.session, stat.session) == (stat.identity, pid, pid)
    one.until(lambda: one.are_ready)
    assert marker_of(stat, f"{PAGE_VARIABLE}={one.pages}/".encode()), "its folder marks whose it is"
    assert one.warm.held_bytes > 1 << 20
    assert one.take() == pid
    assert one.told() == {
        "arguments": ["train", "x.toml"],
        "environment": {"RANK": "7", PAGE_VARIABLE: "page"},
        "log": str(one.log),
    }
    assert pid not in one.pids, "it is the rank's from now on"


def test_one_that_still_imports_is_told_too_unless_it_is_late(
    one: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Path(f"{one.program}.slow")
    slow.touch()
    one.warm.want("all", 1)
    (late,) = one.tick()
    monkeypatch.setattr(pool, "READY_S", 0.0)
    assert one.take() is None
    monkeypatch.setattr(pool, "READY_S", 60.0)
    one.until(lambda: late not in one.pids)
    assert not one.tick(), "after a failure there is a pause"
    (pid,) = one.tick(later_s=warm_calm.FIRST_PAUSE_S + 1.0)
    began_s = time.monotonic()
    assert one.take() == pid
    assert time.monotonic() - began_s < 1.0
    slow.unlink()
    assert one.told()["environment"]["RANK"] == "7"


def test_one_that_was_killed_is_not_used(one: Pool) -> None:
    one.warm.want("all", 1)
    (pid,) = one.tick()
    one.until(lambda: one.are_ready)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    changes = one.changes
    assert one.take() is None
    assert one.changes == changes + 1
    assert one.tick(later_s=warm_calm.FIRST_PAUSE_S + 1.0) != [pid]


def test_another_environment_needs_others(one: Pool) -> None:
    one.warm.want("all", 2)
    one.until(lambda: one.tick() and len(one.pids) == 2 and one.are_ready)
    before = set(one.pids)
    assert one.take(1, COLOUR="blue") is None
    one.until(lambda: len(one.pids) == 2 and one.are_ready and not before & {*one.pids})
    assert one.take(0, COLOUR="blue", OMP_NUM_THREADS="3") is None
    one.until(lambda: len(one.pids) == 2 and one.are_ready)
    pid = one.take(0, COLOUR="blue", OMP_NUM_THREADS="3")
    assert pid is not None
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {b"COLOUR=blue", b"OMP_NUM_THREADS=3"} <= {*environ}


def test_new_code_needs_others(one: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    one.warm.want("all", 1)
    one.until(lambda: one.tick() and one.are_ready)
    (old,) = one.pids
    new = frozenset({*warm_process.code_now(), ("new.py", 1, 2)})
    monkeypatch.setattr(pool, "code_now", lambda: new)
    monkeypatch.setattr(warm_process, "code_now", lambda: new)
    assert one.take() is None
    one.until(lambda: old not in one.pids and one.are_ready)
    assert one.take() is not None


def test_the_package_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "inner" / "module.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    monkeypatch.setattr(warm_process, "PACKAGE", tmp_path)
    seen = [warm_process.code_now()]
    (tmp_path / "inner" / "module.pyc").touch()
    assert warm_process.code_now() == seen[0]
    file.write_text("a = 22\n")
    seen.append(warm_process.code_now())
    os.utime(file, (1.0, 1.0))  # an older file in its place
    seen.append(warm_process.code_now())
    (tmp_path / "other.py").touch()
    seen.append(warm_process.code_now())
    assert len({*seen}) == 4


def test_another_program_and_fewer_ranks_need_none(one: Pool) -> None:
    one.warm.want("all", 2)
    one.until(lambda: one.tick() and len(one.pids) == 2 and one.are_ready)
    first = one.warm._warm[0].pid
    one.warm.expect(1)
    one.until(lambda: one.pids == [first])
    one.warm.expect(0)
    one.until(lambda: not one.pids)
    assert not one.tick(later_s=100.0)
    one.warm.want("off", 2)
    assert not one.tick(later_s=200.0)


def test_the_next_ones_wait_for_the_first_step(one: Pool, tmp_path: Path) -> None:
    now_s = time.monotonic()
    ranks = [running(tmp_path, rank, now_s) for rank in range(2)]
    one.statuses = [status for status, _ in ranks]
    one.warm.want("all", 2)
    assert not one.tick(), "they start"
    for step in (0, 11):
        for _, page in ranks:
            page.issued(Issued(1, step, "init", 1))
        assert not one.tick(), "they load, or are in their first step"
    ranks[0][1].issued(Issued(1, 12, "forward", 1))
    assert not one.tick(), "one of two is past it"
    ranks[1][1].issued(Issued(1, 13, "forward", 1))
    one.checks = True
    assert not one.tick(), "a self-check beside ranks"
    one.checks = False
    assert len(one.tick()) == 1
    one.warm._at_once = 1
    assert len(one.tick()) == 1, "one import at a time"
    one.until(lambda: len(one.pids) == 2 and one.are_ready)


def test_a_long_first_step_is_not_waited_for_and_spares_alone_are_kept(
    one: Pool, tmp_path: Path
) -> None:
    status, _ = running(tmp_path, 0, time.monotonic())
    one.statuses = [status]
    one.warm.want("spares", 1)
    assert not one.tick(later_s=warm_calm.REFILL_S + 1.0), "a node with ranks"
    one.warm.want("all", 1)
    assert not one.tick()
    assert len(one.tick(later_s=warm_calm.REFILL_S + 1.0)) == 1
    one.warm.end()
    one.until(lambda: not one.pids)
    one.warm.want("spares", 1)
    one.statuses = [replace(status, state="exited")]
    assert len(one.tick()) == 1


def test_a_self_check_has_the_node_to_itself(one: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_calm, "QUIET_S", 5.0)
    one.warm.want("all", 1)
    assert not one.tick(later_s=4.0), "the driver may want something else next"
    one.checks = True
    assert not one.tick(later_s=10.0)
    one.checks = False
    assert not one.tick(later_s=14.0)
    assert len(one.tick(later_s=16.0)) == 1


@pytest.mark.parametrize(
    ("is_ours", "save", "patience_s"),
    [(True, False, 1.0), (False, False, 5.0), (True, True, 600.0)],
)
def test_a_trainer_that_is_not_to_save_has_a_second(
    is_ours: bool, save: bool, patience_s: float
) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{deaf}; time.sleep(600)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read(1)
    stat = read_stat(process.pid)
    assert stat is not None
    status = RankStatus(0, 0, process.pid, stat.start_ticks, 1, "running", 0.0, is_ours=is_ours)
    rank = RankProcess(status, process)
    rank.ask(0.0, Deadlines(grace_s=5.0), save=save)
    rank.advance(patience_s - 0.1, Deadlines())
    assert not rank.is_ending
    rank.advance(patience_s, Deadlines())
    assert rank.killed_s == patience_s
    assert process.wait(10) == -signal.SIGKILL
