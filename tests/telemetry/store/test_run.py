"""A run's store as its readers see it: the same from segments and from line files, over restarts,
while it lives, and with everything that can be wrong in a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.telemetry.faults import Hang, Restart
from benchmarks.telemetry.synthetic import Job, write_lines, write_segments
from megascale.errors import DataError
from megascale.events import Header, to_line
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.store.run import open_run
from megascale.telemetry.store.segments import live_segments, store_folder, write_segment
from megascale.telemetry.writer import line_file
from megascale.topology import Mesh

MESH = Mesh(2, 2, 2)
JOB = Job(mesh=MESH, num_steps=20, micro_batches=4, faults=[Hang((3,)), Restart(12, 8)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    write_segments(base / "segments", JOB)
    write_lines(base / "lines", JOB)
    return {"segments": base / "segments", "lines": base / "lines"}


@pytest.fixture
def lines(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the line files alone, to be spoilt."""
    shutil.copytree(folders["lines"], tmp_path / "run", ignore=shutil.ignore_patterns("store"))
    return tmp_path / "run"


def test_line_files_and_segments_are_one_run(folders: dict[str, Path]) -> None:
    with open_run(folders["segments"]) as one, open_run(folders["lines"]) as other:
        assert one.mesh == other.mesh == MESH
        assert one.starts == other.starts
        assert one.places.host_R == other.places.host_R
        means = [run.phase_means(9, 20) for run in (one, other)]
        assert means[0].phases == means[1].phases
        np.testing.assert_allclose(means[0].mean_ms_RP, means[1].mean_ms_RP)
        times = [run.step_times(1, 20) for run in (one, other)]
        np.testing.assert_array_equal(times[0].dur_s_SR, times[1].dur_s_SR)
        np.testing.assert_allclose(times[0].begin_unix_s_SR, times[1].begin_unix_s_SR)
        assert one.spans(10, 10) == other.spans(10, 10)
        assert len(one.spans(10, 10, ranks=[3], names=["forward"])) == 4
        assert one.ongoing() == other.ongoing()
        assert {o.rank for o in one.ongoing()} == {0, 1, 2, 4, 5, 6, 7}
        assert one.incidents() == other.incidents()
        assert one.metrics() == other.metrics()
        assert one.caveats() == other.caveats() == []


@pytest.mark.full
def test_sums_and_spans_of_a_sampled_step_agree(folders: dict[str, Path]) -> None:
    """Of the synthetic runs themselves: timelines are right by construction."""
    with open_run(folders["segments"]) as run:
        by_name: dict[tuple[int, str], int] = {}
        for span in run.spans(20, 20):
            key = span.rank, span.name
            by_name[key] = by_name.get(key, 0) + span.dur_ns
        times = run.phase_times(20, 20, run.phases())
        for name, ns_SR in times.ns_SR.items():
            for rank in range(MESH.world_size):
                assert by_name[rank, name] == pytest.approx(ns_SR[0, rank], rel=0.001, abs=25_000)


def test_of_steps_that_came_again_the_newest_start_counts(folders: dict[str, Path]) -> None:
    with open_run(folders["segments"]) as run:
        assert [start.steps for start in run.starts] == [(1, 12), (9, 20)]
        assert run.steps() == (1, 20)
        count = run.query(
            "SELECT start, min(step) AS a, max(step) AS b, count(*) AS n FROM current_steps "
            "GROUP BY start ORDER BY start"
        ).to_pylist()
        assert [(r["start"], r["a"], r["b"], r["n"]) for r in count] == [
            (0, 1, 8, 64),
            (1, 9, 20, 96),
        ]
        assert run.query("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 192}]
        times = run.step_times(1, 20)
        assert times.begin_unix_s_SR[8, 0] - times.begin_unix_s_SR[7, 0] > 60
        metrics = run.metrics()
        assert [m["step"] for m in metrics if m["start"] == 0] == list(range(1, 13))
        assert [m["step"] for m in metrics if m["current"]] == list(range(1, 21))
        assert {m["start"] for m in metrics if m["current"] and m["step"] > 8} == {1}


@pytest.mark.full
def test_windows(folders: dict[str, Path]) -> None:
    with open_run(folders["segments"]) as run:
        assert run.bounds(Window(), 5) == (16, 20)
        assert run.bounds(Window(None, 10), 5) == (6, 10)
        assert run.bounds(Window(15, 99), 5) == (15, 20)
        with pytest.raises(DataError, match=r"30 to 40 were asked for, .* has 1 to 20"):
            run.bounds(Window(30, 40), 5)
        with pytest.raises(DataError, match="10 to 5 were asked for"):
            run.bounds(Window(10, 5), 5)


@pytest.mark.full
def test_computed_leaves_waits_out(folders: dict[str, Path]) -> None:
    with open_run(folders["segments"]) as run:
        compute = run.computed(9, 20).ns_SR["compute"]
        phases = run.phase_times(9, 20, ["forward", "backward", "tp_row_backward"]).ns_SR
        assert (compute < phases["forward"] + phases["backward"] - phases["tp_row_backward"]).all()
        assert float(np.median(compute)) == pytest.approx(1e9, rel=0.1)


@pytest.mark.full
def test_a_live_run_is_seen_growing(lines: Path) -> None:
    later = {}
    for path in (lines / "telemetry").glob("rank_*.jsonl"):
        whole = path.read_bytes().splitlines(keepends=True)
        later[path] = whole[len(whole) // 2 :]
        path.write_bytes(b"".join(whole[: len(whole) // 2]))
    with open_run(lines) as run:
        before = run.steps()[1]
        assert not run.refresh()
        for path, rest in later.items():
            path.write_bytes(path.read_bytes() + b"".join(rest))
        assert run.refresh()
        assert before < 20
        assert run.steps() == (1, 20)
        assert [start.steps for start in run.starts] == [(1, 12), (9, 20)]


@pytest.mark.full
def test_segments_deleted_under_a_query_are_listed_again(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["segments"], tmp_path / "run")
    folder = store_folder(tmp_path / "run")
    with open_run(tmp_path / "run", catch_up=False) as run:
        first = live_segments(folder)[0]
        shutil.rmtree(first.path)
        assert run.phase_means(1, 20).num_steps_R.tolist() == [12] * 8


@pytest.mark.full
@pytest.mark.full
def test_another_run_in_the_same_place_is_seen(tmp_path: Path) -> None:
    """Its segments have the numbers of those that were there."""
    run_dir = tmp_path / "run"
    write_segments(run_dir, Job(mesh=Mesh(1, 2, 1), num_steps=5))
    with open_run(run_dir, catch_up=False) as run:
        assert (run.mesh.world_size, run.steps()) == (2, (1, 5))
        shutil.rmtree(run_dir)
        write_segments(run_dir, Job(mesh=Mesh(2, 2, 1), num_steps=7))
        assert run.refresh()
        assert (run.mesh.world_size, run.steps()) == (4, (1, 7))
        assert [start.steps for start in run.starts] == [(1, 7)]


def test_a_damaged_segment_is_left_out_and_named(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["segments"], tmp_path / "run")
    folder = store_folder(tmp_path / "run")
    last = live_segments(folder)[0]
    (last.path / "sums.parquet").write_bytes(b"PAR1 and no more")
    with open_run(tmp_path / "run", catch_up=False) as run:
        assert run.phase_means(1, 20).num_steps_R.tolist() == [12] * 8
        assert any(last.path.name in text and "left out" in text for text in run.caveats())


def test_sql_only_reads(folders: dict[str, Path]) -> None:
    with open_run(folders["segments"]) as run:
        assert run.query("SELECT max(rank) AS r FROM ranks").to_pylist() == [{"r": 7}]
        for sql in ("DROP VIEW steps", "SELECT 1; SELECT 2", "COPY steps TO 'x.csv'"):
            with pytest.raises(DataError, match="one SELECT is legal"):
                run.query(sql)
        with pytest.raises(DataError, match="tables: ranks, steps"):
            run.query("SELECT nothing FROM nowhere")
        with pytest.raises(DataError, match="no SQL"):
            run.query("SELEC")


# ---------------------------------------------------------------- bad input


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        open_run(tmp_path / "none")
    with pytest.raises(DataError, match="holds no run"):
        open_run(tmp_path)
    (tmp_path / "telemetry").mkdir()
    with pytest.raises(DataError, match="nothing is recorded"):
        open_run(tmp_path)


@pytest.mark.full
def test_a_run_that_finished_no_step(lines: Path) -> None:
    for path in (lines / "telemetry").glob("rank_*.jsonl"):
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with open_run(lines) as run:
        assert run.mesh == MESH
        with pytest.raises(DataError, match="has finished a step"):
            run.steps()


@pytest.mark.full
def test_torn_lines_and_unknown_versions_are_counted(lines: Path) -> None:
    path = line_file(lines, 2)
    whole = path.read_bytes().splitlines(keepends=True)
    whole.insert(3, b'{"v":1,"kind":"span","rank":2,"na\n')
    whole.insert(9, b'{"v":99,"kind":"step","rank":2,"step":4}\n')
    path.write_bytes(b"".join(whole) + b'{"v":1,"kind":"st')
    with open_run(lines) as run:
        assert run.steps() == (1, 20)
        told = [text for text in run.caveats() if "left out" in text]
        assert len(told) == 1
        assert told[0].startswith("left out of rank_00002.jsonl: 2 lines, the first at byte ")
        assert told[0].endswith(": no JSON, or a torn line; schema version 99, not 1")


@pytest.mark.full
def test_missing_ranks(lines: Path) -> None:
    line_file(lines, 5).unlink()
    with open_run(lines) as run:
        assert run.phase_means(9, 20).rank_R.tolist() == [0, 1, 2, 3, 4, 6, 7]
        assert any("rank 5 of 8 recorded nothing" in text for text in run.caveats())


@pytest.mark.full
def test_a_clock_that_jumped_back_between_starts(lines: Path) -> None:
    path = line_file(lines, 4)
    whole = [json.loads(line) for line in path.read_bytes().splitlines()]
    second = [at for at, line in enumerate(whole) if line["kind"] == "header"][1]
    whole[second]["unix_ns"] -= 3_600_000_000_000
    path.write_text("".join(json.dumps(line) + "\n" for line in whole))
    with open_run(lines) as run:
        assert [start.steps for start in run.starts] == [(1, 12), (9, 20)]
        told = [text for text in run.caveats() if "went back" in text]
        assert len(told) == 1
        assert "rank 4 went back" in told[0]


@pytest.mark.full
def test_two_runs_in_one_folder(lines: Path) -> None:
    other = Header(
        rank=8, world_size=16, tensor=2, data=4, pipeline=2, tp_rank=0, dp_rank=0, pp_rank=1,
        host="other", pid=1, epoch=0, unix_ns=JOB.begin_unix_ns, monotonic_ns=5,
    )  # fmt: skip
    line_file(lines, 8).write_text(to_line(other))
    with open_run(lines) as run:
        assert run.mesh == MESH
        told = [text for text in run.caveats() if "different worlds" in text]
        assert len(told) == 1
        assert "8 ranks" in told[0]
        assert "16 ranks" in told[0]


@pytest.mark.full
def test_a_step_twice_in_one_start_counts_once(folders: dict[str, Path], tmp_path: Path) -> None:
    """A roll-back inside a start, or two runs that write to the same files."""
    from pyarrow import parquet

    shutil.copytree(folders["segments"], tmp_path / "run")
    folder = store_folder(tmp_path / "run")
    last = live_segments(folder)[1]
    tables = {name: parquet.read_table(last.path / f"{name}.parquet") for name in ("steps", "sums")}
    sums = tables["sums"]
    place = sums.schema.get_field_index("ns:optimizer")
    tables["sums"] = sums.set_column(place, "ns:optimizer", [[7_000_000] * sums.num_rows]).cast(
        sums.schema
    )
    write_segment(folder, tables, {})
    with open_run(tmp_path / "run", catch_up=False) as run:
        means = run.phase_means(9, 20)
        assert means.num_steps_R.tolist() == [12] * 8
        assert means.mean_ms_RP[:, means.phases.index("optimizer")] == pytest.approx([7.0] * 8)
        assert any("recorded steps twice" in text for text in run.caveats())


@pytest.mark.full
def test_a_rank_that_was_not_there_at_first(lines: Path) -> None:
    """Its first start is the job's second, and nothing of it is void."""
    path = line_file(lines, 6)
    whole = path.read_bytes().splitlines(keepends=True)
    second = [at for at, line in enumerate(whole) if b'"kind":"header"' in line][1]
    path.write_bytes(b"".join(whole[second:]))
    with open_run(lines) as run:
        assert [start.num_ranks for start in run.starts] == [7, 8]
        assert run.caveats() == []
        rows = run.query(
            "SELECT rank, min(step) AS first, count(*) AS n FROM current_steps GROUP BY rank "
            "ORDER BY rank"
        ).to_pylist()
        assert [(row["first"], row["n"]) for row in rows] == [(1, 20)] * 6 + [(9, 12), (1, 20)]
        assert {o.rank for o in run.ongoing()} == {0, 1, 2, 4, 5, 6, 7}
        assert {number for number, i in run.incidents() if i.rank == 6} == {1}


@pytest.mark.full
def test_means_of_a_long_run_are_of_pieces_of_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(folders["segments"]) as run:
        whole = run.step_means(1, 20)
        assert whole.step_S.tolist() == list(range(1, 21))
        expected = np.nanmean(run.phase_times(1, 20, ["forward"]).ns_SR["forward"], axis=1)
        np.testing.assert_allclose(whole.ns_SR["forward"][:, 0], expected)
        monkeypatch.setattr("megascale.telemetry.store.arrays.PIECES", 4)
        monkeypatch.setattr("megascale.telemetry.store.arrays.MOST_SUMS", 8 * 8)
        pieces = run.step_means(1, 20)
        assert pieces.step_S.tolist() == [1, 2, 6, 7, 11, 12, 16, 17]
        np.testing.assert_allclose(pieces.ns_SR["forward"][:, 0], expected[pieces.step_S - 1])
