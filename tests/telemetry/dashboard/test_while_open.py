"""A dashboard that stays open while its run is resumed, deleted, and replaced by another."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.telemetry.faults import Restart
from megascale.errors import DataError
from megascale.telemetry.dashboard.server import Server
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.store.run import open_run
from megascale.telemetry.writer import line_file
from tests.telemetry.dashboard.served import ask, dashboard, make_run, opened
from tests.telemetry.dashboard.waiting import until

pytestmark = pytest.mark.full


def _overview(server: Server) -> Any:
    return ask(server, "/api/overview").json()


def _all_answer(server: Server) -> dict[str, int]:
    """The status of each reader: 200, or 422 where this cannot be asked of this run."""
    return {name: ask(server, f"/api/read/{name}").status for name in READERS}


def test_a_run_that_is_resumed(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", Restart(12, 8), num_steps=20)
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    later = {}
    for rank in range(16):
        lines = line_file(run, rank).read_bytes().splitlines(keepends=True)
        second = [at for at, line in enumerate(lines) if b'"kind":"header"' in line][1]
        line_file(run, rank).write_bytes(b"".join(lines[:second]))
        later[rank] = b"".join(lines[second:])
    with dashboard(run) as server:
        assert len(opened(server)["starts"]) == 1
        assert ask(server, "/api/read/summary").json()["data"]["last_step"] == 12
        for rank, lines_of in later.items():
            with line_file(run, rank).open("ab") as file:
                file.write(lines_of)
        seen = until(
            lambda: None if (o := _overview(server))["newest_step"] != 20 else o, "its new steps"
        )
        assert [start["steps"] for start in seen["starts"]] == [[1, 12], [9, 20]]
        assert set(_all_answer(server).values()) <= {200, 422}
        means = ask(server, "/api/read/heat_map?first=9&last=20").json()["data"]
        assert means["num_steps"] == [12] * 16, "of steps that came again the newest count"


def test_a_run_that_goes_and_another_that_comes(tmp_path: Path) -> None:
    """Asked all the time: no answer is of both, and none fails but by saying what is missing."""
    run = make_run(tmp_path / "run", mesh=(2, 2, 1), num_steps=20)
    other = make_run(tmp_path / "other", mesh=(1, 8, 1), num_steps=7)
    (other / "config.json").write_text((other / "config.json").read_text().replace("7", "9"))
    statuses, ended = set[int](), threading.Event()

    def asking(server: Server) -> None:
        while not ended.is_set():
            statuses.update(_all_answer(server).values())

    with dashboard(run) as server:
        opened(server)
        asker = threading.Thread(target=asking, args=(server,))
        asker.start()
        try:
            shutil.rmtree(run)
            why = until(lambda: _overview(server)["why"], "it is gone")
            assert "is gone" in why
            other.rename(run)
            seen = until(lambda: (o := _overview(server))["newest_step"] == 7 and o, "the other")
        finally:
            ended.set()
            asker.join()
        assert (seen["world_size"], seen["why"]) == (8, "")
        assert set(_all_answer(server).values()) <= {200, 422}
        assert ask(server, "/api/read/heat_map").json()["data"]["ranks"] == list(range(8))
    assert statuses <= {200, 422}


def test_what_is_gone_is_not_called_well(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=20)
    with open_run(run_dir) as run:
        shutil.rmtree(run_dir)
        for name in ("summary", "heat_map", "stragglers", "what_if", "decomposition", "hang"):
            with pytest.raises(DataError, match=r"all that was stored in .* is gone"):
                READERS[name].ask(run, Window())
        with pytest.raises(DataError, match="is gone, or holds no run"):
            run.refresh()
        (run_dir / "telemetry").mkdir(parents=True)
        with pytest.raises(DataError, match="nothing is recorded"):
            run.again()


def test_the_configuration_is_that_of_the_run_there(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=20)
    with open_run(run_dir) as run:
        (run_dir / "config.json").write_text('{"training": {"steps": 4711}}')
        run.refresh()
        assert run.config == {"training": {"steps": 4711}}
