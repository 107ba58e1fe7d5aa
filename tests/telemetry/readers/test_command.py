"""`megascale diagnose`: its arguments, its output without a terminal, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.telemetry.faults import SlowRank
from benchmarks.telemetry.synthetic import Job, write_segments
from megascale.cli import app
from megascale.errors import ConfigError, DataError
from megascale.telemetry.readers import READERS
from megascale.topology import Mesh


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("command") / "run"
    write_segments(path, Job(mesh=Mesh(1, 8, 1), num_steps=90, faults=[SlowRank(5, 0.2)]))
    return path


def _say(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diagnose", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_list_of_readers() -> None:
    code, output = _say("--list")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == list(READERS)


def test_one_reader_for_a_person(run_dir: Path) -> None:
    code, output = _say(str(run_dir), "stragglers")
    assert code == 0
    assert output.startswith("alert  stragglers: rank 5 on host node-0000 computes ")
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 100


def test_one_reader_as_json(run_dir: Path) -> None:
    _, output = _say(str(run_dir), "stragglers", "--json", "--first", "1", "--last", "90")
    answer = json.loads(output)
    assert (answer["level"], answer["data"]["ranks"]) == ("alert", [5])
    _, output = _say(str(run_dir), "heat_map", "--json", "--ranks", "0-2,5")
    assert json.loads(output)["data"]["ranks"] == [0, 1, 2, 5]


@pytest.mark.full
def test_scripts_may_ask_to_fail(run_dir: Path) -> None:
    assert _say(str(run_dir), "stragglers", "--fail-on", "alert")[0] == 1
    assert _say(str(run_dir), "heat_map", "--fail-on", "notice")[0] == 1
    assert _say(str(run_dir), "heat_map", "--fail-on", "alert")[0] == 0
    assert _say(str(run_dir), "loss", "--fail-on", "notice")[0] == 0


@pytest.mark.full
def test_sql(run_dir: Path) -> None:
    code, output = _say(str(run_dir), "--sql", "SELECT rank, host FROM ranks ORDER BY rank LIMIT 2")
    assert code == 0
    assert [line.split() for line in output.splitlines()] == [
        ["rank", "host"],
        ["0", "node-0000"],
        ["1", "node-0000"],
    ]
    _, output = _say(str(run_dir), "--json", "--sql", "SELECT count(*) AS n FROM steps")
    assert json.loads(output) == [{"n": 720}]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give the folder of a run"),
        (("RUN", "straglers"), "did you mean stragglers?"),
        (("RUN", "loss", "memory"), "legal is RUN"),
        (("RUN", "--compare"), "--compare needs two runs"),
        (("RUN", "--fail-on", "warning"), "legal: notice, alert"),
        (("RUN", "--option", "x"), "legal: NAME=VALUE"),
        (("RUN", "--ranks", "all"), "such as 0-7,12"),
    ],
)
def test_arguments_that_are_none(run_dir: Path, arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        _say(*(str(run_dir) if one == "RUN" else one for one in arguments))


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        _say(str(tmp_path))
