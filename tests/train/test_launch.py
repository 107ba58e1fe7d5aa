"""Which failure is shown when several ranks end, and how long the last one is waited for."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest

from megascale.errors import LaunchError
from megascale.train import launch


class _Rank:
    """A process that has ended with `code`, or runs."""

    def __init__(self, code: int | None) -> None:
        self.returncode = code

    def poll(self) -> int | None:
        return self.returncode


def _failure(logs: Path, *codes: int | None, asked: tuple[int, ...] = ()) -> LaunchError:
    for rank in range(len(codes)):
        (logs / f"rank{rank:05d}.log").touch()
    ranks = cast(Any, [_Rank(code) for code in codes])
    with pytest.raises(LaunchError) as raised:
        launch._wait(ranks, logs, asked)
    return raised.value


def _recorded(logs: Path, rank: int, message: str, *, ago_s: float) -> None:
    launch.record_failure(logs, rank, message, 6)
    file = logs / f"error-rank{rank:05d}.json"
    entry = json.loads(file.read_text())
    file.write_text(json.dumps({**entry, "time_ns": time.time_ns() - int(ago_s * 1e9)}))


def test_an_earlier_record_wins_over_a_death_without_one(tmp_path: Path) -> None:
    _recorded(tmp_path, 1, "not finite", ago_s=3.0)
    _recorded(tmp_path, 2, "peer closed", ago_s=1.0)
    error = _failure(tmp_path, -signal.SIGABRT, 6, 1)
    assert str(error) == "rank 1 of 3: not finite"
    assert error.exit_code == 6


@pytest.mark.parametrize("code", [-signal.SIGKILL, 3])
def test_a_death_wins_over_what_follows_from_it(tmp_path: Path, code: int) -> None:
    _recorded(tmp_path, 0, "peer closed", ago_s=-0.1)
    assert "rank 1 of 2 " in (message := str(_failure(tmp_path, 1, code)))
    assert "SIGKILL" in message or "exited 3" in message


def test_a_death_that_was_asked_for_is_no_failure(tmp_path: Path) -> None:
    _recorded(tmp_path, 0, "peer closed", ago_s=-0.1)
    error = _failure(tmp_path, 1, -signal.SIGHUP, asked=(signal.SIGHUP,))
    assert str(error) == "stopped by SIGHUP while no step was running"


def test_a_record_cut_short_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "error-rank00000.json").write_text('{"time')
    assert "rank 0 of 1 exited 1" in str(_failure(tmp_path, 1))


def test_the_last_ranks_are_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LINGER_S", 0.1)
    message = str(_failure(tmp_path, 0, None, None))
    assert "rank(s) 1, 2 of 3 did not end within" in message


def test_nohup_is_respected() -> None:
    assert signal.SIGHUP in launch.stop_signals()
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in launch.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, old)
