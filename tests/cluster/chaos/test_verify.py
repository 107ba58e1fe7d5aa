"""Each property holds for what is right, and is seen to be broken when it is broken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.backends.processes import MARK
from megascale.cluster.chaos import verify
from megascale.cluster.chaos.observe import Journal
from megascale.cluster.decide import begin
from megascale.cluster.driver import journal as journals
from megascale.cluster.job import JobState
from megascale.cluster.ledger import Ledger
from megascale.cluster.transitions import Event, RankExited, RanksStarted, StepReached
from tests.cluster.driver.jobs import ByHand, policy


def _rows(*steps: int, **changes: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 1 / step,
            "grad_norm": 0.1 + step,
            "lr": 1e-3,
            "consumed_tokens": 1024 * step,
            **changes,
        }
        for step in steps
    ]


def test_the_same_bits_at_the_same_step() -> None:
    reference = _rows(*range(1, 20))
    run = _rows(1, 2, 3, 4, 3, 4, 5)
    check = verify.check_loss(run, reference, ())
    assert check.ok
    assert check.told.startswith("7 rows of 5 steps")
    one_bit = [*run, *_rows(6, loss=1 / 6 + 2**-55)]
    assert one_bit[-1]["loss"] != 1 / 6
    assert "step 6" in verify.check_loss(one_bit, reference, ()).wrong[0]
    assert not verify.check_loss(_rows(30), reference, ()).ok, "nothing was compared"


def test_a_spoilt_step_must_be_right_in_the_end() -> None:
    reference = _rows(*range(1, 20))
    spoilt = [*_rows(1, 2), *_rows(3, loss=9.0), *_rows(2, 3, 4)]
    assert not verify.check_loss(spoilt, reference, ()).ok
    assert verify.check_loss(spoilt, reference, {3}).ok
    assert not verify.check_loss(spoilt[:3], reference, {3}).ok
    assert not verify.check_loss(spoilt, reference, {4}).ok


def test_every_sample_once() -> None:
    assert verify.check_samples(_rows(1, 2, 3, 2, 3, 4)).ok
    assert "step 3 is missing" in verify.check_samples(_rows(1, 2, 4)).wrong
    assert "the first step is 2" in verify.check_samples(_rows(2, 3)).wrong[0]
    twice = [*_rows(1, 2), *_rows(3, consumed_tokens=4096)]
    assert "step 3: 4096 tokens, must be 3072" in verify.check_samples(twice).wrong
    assert not verify.check_samples([]).ok


def test_steps_that_were_done_twice() -> None:
    assert verify.lost_steps(_rows(1, 2, 3, 4, 5)) is None
    assert verify.lost_steps(_rows(4, 5, 6, 7, 6, 7, 8)) == 2
    assert verify.lost_steps(_rows(6, 7, 7)) == 1


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [row["step"] for row in verify.read_metrics(tmp_path)] == [1]
    assert verify.read_metrics(tmp_path / "absent") == []


def _folder(folder: Path) -> Path:
    (folder / "backend").mkdir()
    register = {"job": "j" + os.urandom(4).hex(), "machines": {}, "past": {"node0": "node0"}}
    (folder / "backend" / "local.json").write_text(json.dumps(register))
    return folder


def test_what_is_left_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "GONE_S", 0.1)
    folder = _folder(tmp_path)
    assert verify.check_orphans(folder, []).ok
    job = json.loads((folder / "backend" / "local.json").read_text())["job"]
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, MARK: f"{job}/node0/"},
    )
    try:
        assert f"pid {orphan.pid}" in verify.check_orphans(folder, []).wrong[0]
    finally:
        orphan.send_signal(signal.SIGKILL)
        orphan.wait()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        assert "still listens" in verify.check_orphans(folder, [address]).wrong[0]
    assert verify.check_orphans(folder, [address]).ok
    page, record = tmp_path / "megascale-1-2", folder / "agents" / "node0" / "processes.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"pages": str(page)}))
    assert verify.check_pages(folder).ok
    page.mkdir()
    assert f"{page} is left" in verify.check_pages(folder).wrong
    assert verify.check_orphans(folder, [("192.0.2.7", 80)]).ok, "no address of this machine"


def _journal(folder: Path, events: list[Event], job: JobState | None = None) -> Journal:
    """A driver's journal of these events, each a second after the other, by the wall clock too."""
    hand = ByHand(policy(spares=0))
    hand.train()
    moments = iter(range(1_000, 2_000))
    written = journals.Journal(folder / "journal.sqlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(moments)))
        written.begin(hand.decision, hand.now_s)
        for event in events:
            decision = hand.go(event)
            written.append([(event, decision, hand.now_s)])
    written.close()
    journal = Journal(folder / "journal.sqlite")
    journal.read()
    return journal


def test_a_ledger_that_sums_and_incidents_that_are_closed(tmp_path: Path) -> None:
    epoch = 1
    ended: list[Event] = [RankExited(rank, 0, epoch) for rank in range(4)]
    journal = _journal(tmp_path, [RanksStarted(epoch), StepReached(epoch, 6), *ended])
    assert journal.job is not None
    assert journal.job.over
    assert verify.check_closed(journal).ok
    ledger = verify.check_ledger(journal)
    # the hand's first seconds have no rows: the wall clock of the rows is short by them
    assert [w for w in ledger.wrong if "kinds sum" in w] == []
    broken = Ledger(marked_ns=5_000_000_000, useful_ns=4_000_000_000)
    journal._job = begin(policy(), 0.0).job.__class__(policy(), ledger=broken)
    assert "the kinds sum to 4000000000 ns" in verify.check_ledger(journal).wrong[0]


def test_an_incident_that_nobody_closed(tmp_path: Path) -> None:
    journal = _journal(tmp_path, [RankExited(1, -9, 1, kind="signal", signal="SIGKILL")])
    assert verify.check_closed(journal).wrong == ("incident 1 was closed 0 times",)
    assert not verify.check_ledger(Journal(tmp_path / "absent")).ok
