"""Files that the trainers write: a file server that hangs stops reading them, and no decision."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.driver import reading
from megascale.cluster.driver.detectors import Detectors
from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.first_rank import LOG, FirstRank
from megascale.cluster.driver.launches import MOST_RANKS, Launches
from megascale.cluster.driver.losses import Losses
from megascale.cluster.driver.reading import Readings
from megascale.events import Span, to_line
from tests.cluster.driver.jobs import at_once
from tests.cluster.driver.test_digest import beat, both, events, found, job, program, report


@contextmanager
def hung(path: Path) -> Iterator[None]:
    """Whoever opens it to read waits until the end of this: a pipe that nobody writes into."""
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        for _ in range(100):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:  # nobody waits any more
                break
            time.sleep(0.02)


@pytest.mark.timeout(20)
def test_files_that_hang_stop_no_detector(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, readings = job(straggler_window=5), Readings()
    digest, detectors = Digest(), Detectors(program(tmp_path), readings)
    rank_0 = FirstRank(tmp_path, readings, is_recipe=False)
    found(detectors, digest, state)
    with hung(tmp_path / "metrics.jsonl"), hung(tmp_path / LOG):
        began_s = time.monotonic()
        for step in range(1, 20):
            events(digest, state, float(step), *both(step))
            assert found(detectors, digest, state) == []
            rank_0.look(40.0 * step, step)
        for rank in range(4):
            told = {"digests": {"layers.0": "bad" if rank == 2 else "good"}}
            noticed = [{"name": "replicas_differ", "step": 6, "detail": told}]
            one = beat(f"n{rank // 2}", report(rank, 20, noticed=noticed))
            events(digest, state, 20.0, one)
        assert found(detectors, digest, state) == [("replicas_differ", (2,), True)]
        rank_0.end()
        assert time.monotonic() - began_s < 10.0
        reading_now = [one for one in threading.enumerate() if one.name == "reading"]
        assert len(reading_now) == 1, "one thread, whatever is asked for"


def test_of_a_name_there_is_one_reading_and_its_result_is_for_who_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work: list[Any] = []
    readings, read = Readings(work.append), iter(range(9))
    for _ in range(3):
        assert readings.poll("a", 1, lambda: next(read)) is None
    work.pop()()
    assert not work
    assert readings.take("a", 1) == 0, "asked three times, read once"
    assert readings.take("a", 1) is None
    readings.ask("a", 1, lambda: next(read))
    work.pop()()
    assert readings.take("a", 2) is None, "it was another epoch's"
    readings.ask("a", 2, lambda: next(read))
    monkeypatch.setattr(reading, "SLOW_S", -1.0)
    for _ in range(3):
        assert readings.take("a", 2) is None
    assert [one.levelno for one in caplog.records] == [logging.WARNING], "told once"
    assert "a has not been read" in caplog.text
    work.pop()()
    assert readings.take("a", 2) == 2


def test_a_reading_that_fails_fails_where_it_is_taken() -> None:
    readings = Readings()
    readings.ask("a", None, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        readings.take("a", None, wait_s=10.0)


def test_the_last_lines_of_rank_0_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rank_0 = FirstRank(tmp_path, Readings(), is_recipe=False)
    (tmp_path / LOG).parent.mkdir()
    for text in ("first\n", "second\n"):
        with (tmp_path / LOG).open("a") as file:
            file.write(text)
        rank_0.look(0.0, None) if text == "first\n" else rank_0.end()
    assert [one.getMessage() for one in caplog.records] == ["first", "second"]


def test_losses_of_a_file_that_became_shorter(tmp_path: Path) -> None:
    file, losses = tmp_path / "metrics.jsonl", Losses(tmp_path / "metrics.jsonl", at_once())
    file.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(9)))
    assert [step for step, _ in losses.new()] == [*range(9)]
    file.write_text('{"step": 9, "loss": 2.0}\n')
    assert [(step, of[-1]) for step, of in losses.new()] == [(9, 2.0)]


def test_groups_larger_than_a_look_hold_up_no_other(tmp_path: Path) -> None:
    """All of one node: a group of 40 ranks, whose parts are read in turn, and pairs behind it."""
    large = tuple(range(40))
    pairs = [(rank, rank + 1) for rank in range(40, 60, 2)]
    for rank in range(60):
        name = "world" if rank in large else "tensor"
        at: dict[str, Any] = {"t0_ns": 1, "dur_ns": 1, "clock": "device", "issued_ns": 5}
        line = to_line(Span(rank=rank, name="x", step=1, group=name, seq=7, **at))
        (tmp_path / f"rank_{rank:05d}.jsonl").write_text("\n" + line)
    launches, seen = Launches(tmp_path, at_once()), set()
    for step in range(8):
        launches.ask(step, {"world": [large], "tensor": pairs}, [range(60)])
        read = launches.take()
        assert read is not None
        ranks = {one.rank for one in read}
        assert 1 < len(ranks) <= MOST_RANKS
        seen |= ranks
    assert seen == {*range(60)}
