"""Where a driver starts, what it says where it cannot, and which updates it takes."""

from __future__ import annotations

import json
import socket
import sqlite3
from pathlib import Path

import pytest

from megascale.cluster.decide import begin
from megascale.cluster.driver import session
from megascale.cluster.driver.journal import Journal
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.session import Job, start
from megascale.cluster.transitions import StopRequested
from megascale.config import load_config
from megascale.errors import ConfigError, LaunchError
from tests.cluster.driver.fakes import PaperBackend
from tests.cluster.driver.jobs import ByHand, policy
from tests.cluster.driver.test_program import RECIPE


def job_in(run_dir: Path) -> Job:
    return Job(Program(run_dir, ()), policy(2))


def ended(run_dir: Path, port: int, *, well: bool) -> None:
    """What a driver leaves behind that listened at `port`."""
    hand = ByHand(policy(2))
    journal = Journal(run_dir / "driver" / "journal.sqlite")
    journal.begin(begin(policy(2)), 0.0)
    if well:
        event = StopRequested()
        journal.append([(event, hand.go(event), 1.0)])
        assert hand.job.over
    journal.close()
    (run_dir / "driver" / "address.json").write_text(json.dumps({"port": port}))


@pytest.mark.parametrize("kind", ["file", "proc"])
def test_a_run_folder_that_cannot_be_is_refused_with_what_to_do(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "file" if kind == "file" else Path("/proc/none")
    with pytest.raises(LaunchError, match=r"run folder .* cannot be written .*--set job.run_dir="):
        start(job_in(run_dir), PaperBackend())


def test_a_folder_whose_journal_is_refused_is_let_go(tmp_path: Path) -> None:
    Journal(tmp_path / "driver" / "journal.sqlite").close()
    with sqlite3.connect(tmp_path / "driver" / "journal.sqlite") as db:
        db.execute("INSERT INTO transitions VALUES (1, 'state', '{}', 0, 0.0, 0.0, 0.0)")
    db.close()
    for _ in range(2):
        with pytest.raises(LaunchError, match="no journal of this version"):
            start(job_in(tmp_path), PaperBackend())


def test_the_port_of_an_ended_job_may_be_somebody_elses(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended(tmp_path / "over", port, well=True)
        started = start(job_in(tmp_path / "over"), PaperBackend())
        try:
            assert started.server.port not in (0, port)
        finally:
            started.server.close()
            started.driver.abandon()
        ended(tmp_path / "runs-on", port, well=False)  # its agents look for it there
        with pytest.raises(LaunchError, match=f"port {port} "):
            start(job_in(tmp_path / "runs-on"), PaperBackend())


@pytest.mark.parametrize(
    ("earlier", "new", "refused"),
    [
        ((), ("optimizer.lr=1e-4", "model.hidden_dropout=0.1"), ""),
        ((), ("model.hidden_size=32",), "model.hidden_size"),
        ((), ("training.seq_len=64",), "training.seq_len"),
        ((), ("cluster.suspect_after_s=9",), r"cluster.suspect_after_s .*started again"),
        ((), ("job.run_dir=elsewhere",), "job.run_dir"),
        (
            ("training.micro_batch_size=2", "training.global_batch_size=4"),
            ("training.micro_batch_size=4",),
            "batch",
        ),
    ],
)
def test_an_update_that_the_next_epoch_would_die_of_is_refused(
    earlier: tuple[str, ...], new: tuple[str, ...], refused: str
) -> None:
    """A healthy job ended: its checkpoint was another model's. Updates add up."""
    recipe = Path(RECIPE)
    job = Job(Program(Path("runs"), ()), policy(2), config=load_config(recipe), recipe=recipe)
    if not refused:
        session._check_update(job, earlier, new)
        return
    session._check_update(job, (), earlier)
    with pytest.raises(ConfigError, match=refused):
        session._check_update(job, earlier, new)
