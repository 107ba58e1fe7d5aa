"""The journal rebuilds the job, also from a file that was cut short; one driver a folder."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from megascale.cluster.decide import Decision
from megascale.cluster.driver.journal import Journal, is_unfinished
from megascale.cluster.driver.lock import DriverLock, FencedDriverError
from megascale.cluster.transitions import (
    Event,
    Found,
    RankExited,
    StepReached,
    StopRequested,
)
from megascale.errors import LaunchError
from megascale.telemetry.diagnose.finding import Finding
from tests.cluster.driver.jobs import ByHand, policy

BATCH = 50


class Journaled(ByHand):
    """A job whose transitions are written as the driver does, `BATCH` at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(policy(2, spares=1))
        self.path = path
        self.journal = Journal(path)
        self.journal.begin(self.decision, 0.0)
        self.unwritten: list[tuple[Event, Decision, float]] = []

    def go(self, event: Event, after_s: float = 1.0) -> Decision:
        decision = super().go(event, after_s)
        self.unwritten.append((event, decision, self.now_s))
        if len(self.unwritten) >= BATCH:
            self.write()
        return decision

    def write(self) -> None:
        self.journal.append(self.unwritten)
        self.unwritten = []


def full(path: Path, num_steps: int = 1200) -> Journaled:
    """A job with a recovery and many steps; its file is closed."""
    hand = Journaled(path)
    hand.train()
    hand.go(RankExited(3, -11, 1, "signal", "\N{SNOWMAN} 'quotes'", "SIGSEGV", 5))
    hand.stopped()
    hand.checked()
    hand.go(Found(Finding("traffic", (1,), {"worst": 3.5, "nested": [1, {"a": None}]})))
    for step in range(6, num_steps):
        hand.go(StepReached(2, step))
    hand.write()
    hand.journal.close()
    return hand


def test_a_new_driver_has_the_job_of_the_one_before(tmp_path: Path) -> None:
    hand = full(tmp_path / "journal.sqlite", 700)
    journal = Journal(hand.path)
    assert journal.restore() == (hand.job, hand.now_s)
    assert journal.lost == ""
    journal.close()


def test_a_row_says_what_came_and_what_was_done(tmp_path: Path) -> None:
    hand = full(tmp_path / "journal.sqlite", 10)
    with sqlite3.connect(hand.path) as db:
        text, epoch = db.execute(
            "SELECT json, epoch FROM transitions WHERE kind = 'RankExited'"
        ).fetchone()
    db.close()
    assert '"do": "StopEpoch"' in text
    assert '"signal": "SIGSEGV"' in text
    assert epoch == 1


def test_any_cut_leaves_a_journal_that_opens_and_goes_on(tmp_path: Path) -> None:
    """Every job that is restored is one that was: the state after some row."""
    hand = full(tmp_path / "whole" / "journal.sqlite")
    data = hand.path.read_bytes()
    chosen = random.Random(7)
    newest = 0.0
    for number in range(40):
        path = tmp_path / str(number) / "journal.sqlite"
        path.parent.mkdir()
        path.write_bytes(data[: chosen.randrange(len(data))])
        journal = Journal(path)
        restored = journal.restore()
        assert restored is None or restored[0].epoch <= hand.job.epoch
        if restored is not None:
            newest = max(newest, restored[1])
            decision = ByHand(policy(2)).decision
            journal.append([(StopRequested(), decision, restored[1])])
        journal.close()
        if path.stat().st_size:
            again = Journal(path)
            assert again.lost == "", "what was lost is said once"
            again.close()
    assert newest > 0.5 * hand.now_s, "most of a file that lost its end is read"


def test_what_was_lost_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hand = full(tmp_path / "journal.sqlite")
    data = hand.path.read_bytes()
    hand.path.write_bytes(data[: len(data) // 2])
    journal = Journal(hand.path)
    journal.close()
    assert "was damaged" in journal.lost
    assert "damaged-1" in journal.lost
    assert caplog.text.count("was damaged") == 1
    assert (tmp_path / "journal.sqlite.damaged-1").stat().st_size == len(data) // 2


def test_garbage_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"no database" * 500)
    journal = Journal(path)
    assert journal.restore() is None
    assert "0 transitions" in journal.lost
    journal.close()


def test_a_file_that_cannot_be_written_now_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no damaged one: set aside, a job would be lost for a disk that was full for a while."""
    hand = full(tmp_path / "journal.sqlite", 10)
    before = hand.path.read_bytes()
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **how: connect(path, **{**how, "timeout": 0.1})
    )
    other = connect(hand.path)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(LaunchError, match=r"cannot be used .*locked.*same command"):
        Journal(hand.path)
    other.close()
    assert not [*tmp_path.glob("*damaged*")]
    assert hand.path.read_bytes() == before
    journal = Journal(hand.path)
    restored = journal.restore()
    assert restored is not None
    assert restored[0] == hand.job
    journal.close()


def test_a_disk_that_fills_meanwhile_is_told_in_a_line_and_costs_nothing_written(
    tmp_path: Path,
) -> None:
    hand = Journaled(tmp_path / "journal.sqlite")
    hand.train()
    hand.write()
    written = [(hand.job, hand.now_s)]

    def train_on() -> None:
        for step in range(6, 5000):
            hand.go(StepReached(1, step))
            if not hand.unwritten:
                written.append((hand.job, hand.now_s))

    db = hand.journal._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")  # to SQLite a full disk
    with pytest.raises(LaunchError, match=r"disk is full.*make room.*same command.*ranks .*go on"):
        train_on()
    hand.journal.close()
    journal = Journal(hand.path)
    assert journal.restore() == written[-1]
    journal.close()


@pytest.mark.parametrize("kind", ["StepReached", "state"])
@pytest.mark.parametrize("garbage", [b"\x01\x00", b"\xff\xfe"])
def test_a_row_that_is_no_text_is_damage(tmp_path: Path, kind: str, garbage: bytes) -> None:
    """SQLite keeps no sums of its pages: it opens such a file."""
    hand = full(tmp_path / "journal.sqlite", 120)
    with sqlite3.connect(hand.path) as db:
        (number,) = db.execute("SELECT max(id) FROM transitions WHERE kind = ?", (kind,)).fetchone()
        db.execute(
            "UPDATE transitions SET json = CAST(? AS TEXT) WHERE id = ?", (b"{" + garbage, number)
        )
    db.close()
    journal = Journal(hand.path)
    restored = journal.restore()
    assert restored is not None
    assert restored[0].epoch <= hand.job.epoch
    assert f"{number - 1} transitions were read" in journal.lost
    journal.close()
    again = Journal(hand.path)
    assert again.restore() == restored
    again.close()


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    hand = full(tmp_path / "journal.sqlite", 10)
    with sqlite3.connect(hand.path) as db:
        db.execute(
            "INSERT INTO transitions (kind, json, epoch, job_s, unix_s, monotonic_s) "
            "VALUES ('NotAnEvent', '{\"event\": {}}', 1, 1.0, 1.0, 1.0)"
        )
    db.close()
    journal = Journal(hand.path)
    with pytest.raises(LaunchError, match="no journal of this version"):
        journal.restore()
    journal.close()


def test_whether_a_job_has_ended_can_be_seen_from_outside(tmp_path: Path) -> None:
    assert not is_unfinished(tmp_path / "absent.sqlite")
    with sqlite3.connect(tmp_path / "damaged.sqlite") as db:
        db.execute("CREATE TABLE transitions (id INTEGER PRIMARY KEY, json TEXT)")
        db.execute("INSERT INTO transitions VALUES (1, NULL)")
    db.close()
    assert is_unfinished(tmp_path / "damaged.sqlite")
    hand = Journaled(tmp_path / "journal.sqlite")
    hand.train()
    hand.write()
    assert is_unfinished(hand.path)
    hand.go(StopRequested())
    hand.stopped()
    hand.write()
    assert hand.job.over
    assert not is_unfinished(hand.path)
    hand.journal.close()


def test_a_second_driver_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    first = DriverLock(tmp_path / "lock")
    with pytest.raises(LaunchError, match=r"has a driver: .* process \d+ since"):
        DriverLock(tmp_path / "lock")
    first.release()
    second = DriverLock(tmp_path / "lock")
    assert second.is_held
    assert not first.is_held
    second.release()


def test_a_driver_whose_lock_was_taken_away_acts_no_more(tmp_path: Path) -> None:
    stale = DriverLock(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    other = DriverLock(tmp_path / "lock")
    with pytest.raises(FencedDriverError, match="stale"):
        stale.check()
    other.check()
    stale.release()
    other.release()
