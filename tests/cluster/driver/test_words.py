"""The lines that a person reads: what happened, to whom, what follows; no event's name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megascale.cluster import transitions
from megascale.cluster.driver.first_rank import LOG, MOST_LINES, FirstRank
from megascale.cluster.driver.words import LONGEST, MOST_A_SECOND, Dated, Words, happened
from megascale.cluster.job import Fault
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    CommandDone,
    Event,
    EvictRequested,
    Found,
    HangSuspected,
    NodeGone,
    NodeJoined,
    NodeSilent,
    RankExited,
    RanksStarted,
    StepReached,
)
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.hang import RankView, localise
from tests.cluster.driver.jobs import ByHand, at_once, policy
from tests.cluster.driver.test_ladder import training


class Told(ByHand):
    """A job by hand that remembers what a person would have read."""

    def __init__(self, hand: ByHand) -> None:
        self.__dict__.update(hand.__dict__)
        self.words = Words()
        self.lines: list[str] = []

    def go(self, event: Event, after_s: float = 1.0):  # type: ignore[no-untyped-def]
        decision = super().go(event, after_s)
        self.lines += [line for _, line in self.words.lines(event, decision)]
        return decision


def test_a_job_begins() -> None:
    told = Told(ByHand(policy(1)))
    told.go(Allocated(1, ("n0",)))
    told.go(NodeJoined("n0", "i", "h", "ip"))
    told.go(CheckDone("n0", ok=True))
    told.go(RanksStarted(1))
    assert told.lines == [
        "n0 joined and checks itself",
        "n0 passed its self-check",
        "starting 2 ranks on n0 (epoch 1)",
        "all 2 ranks are in their first step",
    ]


def test_a_killed_rank_from_the_signal_to_the_first_new_step() -> None:
    told = Told(training())
    gone = "ended by SIGKILL without a word"
    told.go(RankExited(3, -9, 1, "signal", gone, signal="SIGKILL", step=42))
    told.go(RankExited(0, 1, 1, "exception", "Connection closed by peer", step=42))
    told.stopped()
    told.checked()
    told.go(StepReached(2, 43))
    assert told.lines == [
        "rank 3 on n1 was killed by signal 9 (SIGKILL) at step 42; all ranks stop",
        "n1 passed its self-check",
        "restarting 4 ranks on n0, n1 (epoch 2)",
        "over: signal (recovered: step 43 of epoch 2)",
    ]


def test_a_cause_that_is_found_later_is_told() -> None:
    told = Told(training())
    told.go(RankExited(0, 1, 1, "exception", "Connection closed by peer", step=7))
    told.go(RankExited(3, 1, 1, "out_of_memory", "CUDA out of memory", step=7))
    told.stopped()
    assert told.lines[:2] == [
        "rank 0 on n0 lost a peer at step 7: Connection closed by peer; all ranks stop",
        "the cause: rank 3 on n1 ran out of memory at step 7: CUDA out of memory",
    ]


def test_a_hang_is_told_when_it_is_suspected_and_when_it_is_named() -> None:
    told = Told(training())
    told.go(HangSuspected((0, 1, 2, 3), "rank 2 has been in forward", 6))
    told.go(Found(Finding("hang", (2,), {"waits": 3}, step=6)))
    assert told.lines == [
        "ranks 0, 1, 2, 3 on n0, n1 made no progress at step 6: rank 2 has been in forward",
        "rank 2 on n1 made no progress at step 6: waits 3; all ranks stop",
    ]


def test_evidence_is_read_by_a_person() -> None:
    told = Told(training())
    share = {"relative": {"n1/mlx5_0/1": 0.51234567}, "steps": 40}
    told.go(Found(Finding("traffic_fell", (2, 3), share, step=6, certain=False)))
    told.go(HangSuspected((0, 1, 2, 3), "rank 2 has been in forward", 6))
    views = {
        rank: RankView(epoch=1, step=6, phase="forward", age_s=0.1, alive=rank != 2)
        for rank in range(4)
    }
    told.go(Found(localise(views, {"world": [(0, 1, 2, 3)]})))
    fell, _, hang = told.lines
    assert fell == "traffic fell at ranks 2, 3 on n1: relative n1/mlx5_0/1: 0.512346, steps 40"
    dead = "rank 2: dead, in step 6, forward; 3 others in step 6, forward"
    assert hang == f"rank 2 on n1 made no progress at step 6: {dead}; all ranks stop"


def test_an_agent_that_comes_back_to_a_new_driver_is_no_empty_line() -> None:
    told = Told(training(spares=1))
    node = told.job.nodes["s0"]
    told.go(NodeJoined("s0", node.incarnation, node.host, node.ip))
    assert told.lines == []


def test_nodes_that_fall_silent_or_leave() -> None:
    told = Told(training(spares=1))
    told.go(NodeSilent("n1", 3.0))
    told.go(NodeGone("s0", "gone: its process ended"))
    told.go(EvictRequested("n0", "maintenance", block=False))
    assert told.lines == [
        "n1 is silent: n1 was not heard for 3.0 s",
        "s0 leaves the job: gone: its process ended",
        "asking for 1 machine more",
        "evict: n0: maintenance; all ranks save and stop",
    ]


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Fault("exit", ("n0",), (1,), 5, "exited 7, its log ends: bye", code=7), "code 7 at step"),
        (Fault("exit", ("n0",), (1,), 5, "exited 7, its log ends: bye", code=7), ": its log ends"),
        (Fault("xid", ("n0",), (0, 1), None, "GPU 0: Xid 79"), "xid at ranks 0, 1 on n0: GPU 0"),
        (Fault("node_lost", ("n3",), (6, 7), 5, ""), "n3 is lost at step 5"),
        (Fault("signal", (), tuple(range(20)), code=-64), "and 12 more was killed by signal 64"),
    ],
)
def test_how_a_fault_reads(fault: Fault, line: str) -> None:
    assert line in happened(fault)


def test_no_line_names_an_event() -> None:
    told = Told(training(spares=1))
    for event in (NodeGone("n1", "preempted"), CommandDone("n0", "stop", 1)):
        told.go(event)
    names = [name for name in vars(transitions) if name[0].isupper()]
    assert told.lines
    assert not [line for line in told.lines if any(f"{name}:" in line for name in names)]


def test_a_thousand_nodes_that_join_are_some_lines(caplog: pytest.LogCaptureFixture) -> None:
    hand = ByHand(policy(1000, 1))
    words = Words()
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            event = NodeJoined(f"n{number}", "i", f"h{number}", "ip")
            words.say(event, hand.go(event))
    assert 0 < len(caplog.records) <= 10 * MOST_A_SECOND


def test_an_error_as_long_as_a_novel_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    words, hand = Words(), training()
    fault = transitions.RankExited(3, 1, hand.job.epoch, kind="exception", message="e" * 4000)
    words.say(fault, hand.go(fault))
    (line,) = [one for one in shown(caplog) if "eee" in one]
    assert len(line) < LONGEST + 60
    assert line.endswith("characters, in the journal")


def test_the_date_is_told_once_a_day() -> None:
    dated = Dated("%(asctime)s %(message)s", "%H:%M")
    records = [logging.makeLogRecord({"msg": "x", "created": at}) for at in (0.0, 60.0, 1e5)]
    lines = [dated.format(record) for record in records]
    assert [line.count("\n") for line in lines] == [1, 0, 1]


# ---------------------------------------------------------------- rank 0's own lines


def write(run_dir: Path, text: str) -> None:
    (run_dir / LOG).parent.mkdir(exist_ok=True)
    with (run_dir / LOG).open("a") as file:
        file.write(text)


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_steps_of_rank_0_are_shown_and_tracebacks_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, "step: 9  loss: 9.9\n")  # of a run before
    rank = FirstRank(tmp_path, at_once(), is_recipe=True)
    write(tmp_path, "[agent] rank 0 starts in epoch 1\n[rank0] resumed from memory at step 41\nst")
    rank.look(1.0, None)
    assert shown(caplog) == ["resumed from memory at step 41"]
    write(tmp_path, "ep: 42  loss: 1.5\nTraceback (most recent call last):\n[rank0]: Error\n")
    rank.look(2.0, 42)
    assert shown(caplog) == ["step: 42  loss: 1.5"]


def test_a_program_of_ones_own_is_shown_as_it_speaks_and_no_flood(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rank = FirstRank(tmp_path, at_once(), is_recipe=False)
    write(tmp_path, "epoch 3, all is well\n" + "x\n" * 99)
    rank.look(1.0, None)
    lines = shown(caplog)
    assert lines[0] == "epoch 3, all is well"
    assert len(lines) == MOST_LINES + 1
    assert lines[-1].startswith("80 lines more")


def test_where_rank_0_is_quiet_the_step_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rank = FirstRank(tmp_path, at_once(), is_recipe=True)
    for second in range(100):
        rank.look(float(second), 10 + second)
    assert shown(caplog) == ["step: 40", "step: 70", "step: 100"]
