"""What a run is called in a queue."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megascale.telemetry.path.queue import QueueError
from megascale.telemetry.path.run_id import ID_FILE, run_name


def test_it_stays_and_is_of_this_folder_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "here" / "run 7", tmp_path / "there" / "run 7"
    for folder in (one, other):
        folder.mkdir(parents=True)
    name = run_name(one)
    assert re.fullmatch(r"run_7\.[0-9a-f]{12}", name)
    assert run_name(one) == name
    assert run_name(other) != name
    shutil.rmtree(one)
    one.mkdir()
    assert run_name(one) != name, "another run in the place of the first"


def test_of_many_who_come_first_one_leaves_it(tmp_path: Path) -> None:
    for number in range(20):
        run = tmp_path / str(number)
        run.mkdir()
        with ThreadPoolExecutor(8) as pool:
            names = set(pool.map(run_name, [run] * 8))
        assert len(names) == 1
        assert [path.name for path in (run / "telemetry").iterdir()] == [ID_FILE]


def test_what_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / ID_FILE).write_text("mine\n")
    with pytest.raises(QueueError, match="holds 'mine', and no id of 12 hexadecimal digits"):
        run_name(tmp_path)
    with pytest.raises(QueueError, match="cannot be written"):
        run_name(tmp_path / "nowhere")
