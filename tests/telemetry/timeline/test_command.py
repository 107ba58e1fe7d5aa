"""`megascale trace` of a run folder: out of its store, checked as Perfetto would read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.telemetry.synthetic import Job, write_lines
from megascale.cli import app
from megascale.errors import ConfigError, DataError
from megascale.telemetry.store.run import open_run
from megascale.telemetry.timeline.stored import clocks_of
from megascale.topology import Mesh
from tests.telemetry.timeline.importer import import_trace

MESH = Mesh(tensor=2, data=2, pipeline=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline") / "run"
    write_lines(folder, Job(mesh=MESH, num_steps=25, ranks_per_host=4, micro_batches=4))
    return folder


def trace(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.full
def test_the_newest_steps_of_all_ranks(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "all.json.gz"
    said = trace(run, "-o", output)
    found = import_trace(output)
    assert found.faults == []
    assert said.startswith(f"{output}: 8 ranks, steps 6 to 25, ")
    assert f"{len(found.arrows)} arrows" in said
    assert "clocks of 2 hosts aligned to within" in said
    counts = found.metadata["arrows"]
    # two sampled steps: 4 pipelines of two stages, 4 micro-batches, there and back
    sends = [a for a, _ in found.arrows if a.event["name"] == "send"]
    assert len(sends) == 2 * 4 * 4 * 2
    assert counts == {"arrows": len(found.arrows), "lost": 0, "outside": 0, "against_time": 0}
    again = tmp_path / "again.json.gz"
    trace(run, "-o", again)
    assert again.read_bytes() == output.read_bytes()


@pytest.mark.full
def test_a_pipeline_group_in_a_window(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "pipeline.json"
    arguments = ("--first", "20", "--last", "21", "--view", "pipeline", "--rank", "5", "--no-align")
    said = trace(run, "-o", output, *arguments)
    found = import_trace(output)
    assert found.faults == []
    assert "2 ranks, steps 20 to 21" in said
    assert sorted(found.order, key=lambda rank: found.order[rank]) == [1, 5]
    assert {one.event["args"]["step"] for one in found.slices} == {20, 21}
    assert "clocks are as they were recorded: --no-align" in said


@pytest.mark.full
def test_others_can_ask_for_the_clocks_alone(run: Path, tmp_path: Path) -> None:
    with open_run(run) as opened:
        clocks = clocks_of(opened, 11, 25)
    trace(run, "-o", tmp_path / "t.json", "--first", "11")
    assert clocks.as_json() == import_trace(tmp_path / "t.json").metadata["clocks"]
    assert len(clocks.hosts) == 2


def test_steps_without_spans_are_said(run: Path, tmp_path: Path) -> None:
    said = trace(run, "-o", tmp_path / "t.json", "--first", "11", "--last", "12")
    assert "0 spans, 0 arrows" in said
    assert "note: none of these steps has its spans" in said


@pytest.mark.full
def test_what_cannot_be_asked(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.json"):
        trace(run, "-o", tmp_path / "trace.zip")
    with pytest.raises(DataError, match="has 1 to 25"):
        trace(run, "-o", tmp_path / "t.json", "--first", "90")
    with pytest.raises(DataError, match="no folder"):
        trace(tmp_path / "nowhere", "-o", tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []
