"""What is told once is told, also when a heartbeat is lost; and what stands in a report."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megascale.cluster.agent.board import FAILURE_WAIT_S, MOST_LOG, MOST_STEPS, Board, Unsent
from megascale.cluster.agent.proc import read_stat
from megascale.cluster.agent.progress import make_page, page_path, rank_of_page
from megascale.cluster.agent.rank_process import RankStatus
from megascale.cluster.messages import DeviceReport, Failure, LogMatch, NicReport, StepSums
from megascale.events import Completed, Issued, ProgressWriter

NOW = RankStatus(
    rank=3,
    local_rank=1,
    pid=os.getpid(),
    start_ticks=0,
    epoch=7,
    state="running",
    started_s=0.0,
)


@pytest.fixture
def status(tmp_path: Path) -> RankStatus:
    stat = read_stat(os.getpid())
    assert stat is not None
    page = page_path(tmp_path, 3, 7)
    make_page(page)
    began_s = time.monotonic() - 5.0
    return replace(NOW, start_ticks=stat.start_ticks, page=str(page), started_s=began_s)


def test_unsent_items_stay_until_they_were_heard() -> None:
    unsent: Unsent[int] = Unsent(3)
    for item in range(5):
        unsent.add(item)
    items, mark = unsent.items()
    assert items == [2, 3, 4]
    unsent.add(5)
    unsent.heard(mark)
    assert unsent.items()[0] == [5]


def test_a_lost_heartbeat_loses_nothing(status: RankStatus) -> None:
    board = Board(lambda: (status,))
    known = board.of(status)
    known.steps.add(StepSums(step=1, total_ns=1))
    board.matched(LogMatch(rule="nccl", rank=3, line="a", unix_ns=1))
    board.see_devices([DeviceReport(index=0, xid=[79])])
    lost = board.report()
    known.steps.add(StepSums(step=2, total_ns=1))
    board.matched(LogMatch(rule="nccl", rank=3, line="b", unix_ns=2))
    board.see_devices([DeviceReport(index=0, xid=[])])
    report = board.report()
    assert [step.step for step in lost.ranks[0].steps] == [1]
    assert [step.step for step in report.ranks[0].steps] == [1, 2]
    assert [(m.line, m.count) for m in report.log] == [("a", 2)]
    assert report.devices[0].xid == [79]
    board.matched(LogMatch(rule="nccl", rank=3, line="c", unix_ns=3))
    report.heard()
    after = board.report()
    assert not after.ranks[0].steps
    assert [(m.line, m.count) for m in after.log] == [("a", 1)]
    assert after.devices[0].xid == []


def test_everything_is_bounded(status: RankStatus) -> None:
    board = Board(lambda: (status,))
    for number in range(1000):
        board.of(status).steps.add(StepSums(step=number, total_ns=1))
        board.matched(LogMatch(rule=f"r{number}", rank=3, line="a", unix_ns=1))
    report = board.report()
    assert [step.step for step in report.ranks[0].steps] == list(range(1000 - MOST_STEPS, 1000))
    assert len(report.log) == MOST_LOG


def test_settings_are_told_once_until_they_change() -> None:
    board = Board(tuple)

    def told(**settings: str) -> dict[str, str]:
        board.see_nics([NicReport(name="eth0", up=True, counters={"a": 1}, settings=settings)])
        report = board.report()
        if "lost" not in settings:
            report.heard()
        assert report.nics[0].counters == {"a": 1}
        return report.nics[0].settings

    assert told(mtu="9000", lost="") == {"mtu": "9000", "lost": ""}
    assert told(mtu="9000") == {"mtu": "9000"}
    assert told(mtu="9000") == {}
    assert told(mtu="1500") == {"mtu": "1500"}
    assert told(mtu="1500") == {}


def test_the_progress_page_makes_a_rank_run(status: RankStatus) -> None:
    board = Board(lambda: (status,))
    (before,) = board.report().ranks
    assert (before.state, before.progress) == ("starting", None)
    writer = ProgressWriter(Path(status.page))
    since_ns = time.monotonic_ns() - 2_000_000_000
    writer.issued(Issued(6, 41, "forward", since_ns))
    assert board.report().ranks[0].progress is None, "of another epoch"
    writer.issued(Issued(7, 42, "grad_sync", since_ns, 1, 2, group_id=9, seq=5, saved=3))
    writer.completed(Completed(41, "optimizer"))
    (report,) = board.report().ranks
    assert report.state == "running"
    assert report.os_state == "R"
    assert report.progress is not None
    assert 2.0 <= report.progress.age_s < 3.0
    told = report.progress.model_dump(exclude={"age_s"})
    assert told == {
        "epoch": 7,
        "step": 42,
        "phase": "grad_sync",
        "chunk": 1,
        "micro_batch": 2,
        "group_id": 9,
        "seq": 5,
        "completed_step": 41,
        "completed_phase": "optimizer",
        "saved": 3,
    }
    writer.close()


def test_a_page_with_nonsense_in_it_is_no_progress(status: RankStatus) -> None:
    board = Board(lambda: (status,))
    writer = ProgressWriter(Path(status.page))
    writer.issued(Issued(7, 42, "forward", time.monotonic_ns()))
    assert board.report().ranks[0].progress is not None
    writer._map[48:56] = b"\xff" * 8  # a phase that there is not
    assert board.report().ranks[0].progress is None
    writer.close()


def test_an_exit_waits_a_moment_for_its_cause(status: RankStatus) -> None:
    ended = replace(status, state="exited", exit_code=1, ended_s=time.monotonic())
    board = Board(lambda: (ended,))
    assert board.report().ranks[0].state == "starting", "its cause is not known yet"
    board.of(ended).failure = Failure(kind="exit", message="m", unix_ns=1, exit_code=1)
    board.of(ended).is_explained = True
    (report,) = board.report().ranks
    assert (report.state, report.exit_code) == ("exited", 1)
    assert board.report().first_failed == 3
    late = replace(ended, ended_s=time.monotonic() - FAILURE_WAIT_S)
    assert Board(lambda: (late,)).report().ranks[0].state == "exited", "but no longer"


def test_another_process_with_its_pid_is_not_the_rank(status: RankStatus) -> None:
    other = replace(status, start_ticks=status.start_ticks + 1)
    (report,) = Board(lambda: (other,)).report().ranks
    assert report.rss_bytes is None
    assert report.os_state is None


def test_a_page_says_whose_it_is() -> None:
    assert rank_of_page("/dev/shm/megascale-0f/rank00012-e7") == (12, 7)
    assert rank_of_page("/dev/shm/other") is None
