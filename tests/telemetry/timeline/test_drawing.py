"""The timeline against what Perfetto makes of it, against known values, and byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import ConfigError, DataError
from megascale.events import Event, Header, Incident, Span, Step, Sums, run_header
from megascale.telemetry.timeline import Drawn, Events, Selection, draw_timeline, parse_ranks
from megascale.topology import Mesh
from tests.telemetry.timeline.importer import Imported, import_trace, load


def header(rank: int, unix_ns: int, monotonic_ns: int) -> Header:
    base = run_header(Mesh(tensor=2), rank, host=f"node{rank}")
    return replace(base, unix_ns=unix_ns, monotonic_ns=monotonic_ns)


def span(rank: int, name: str, t0_ns: int, dur_ns: int, **more: Any) -> Span:
    return Span(rank=rank, name=name, t0_ns=t0_ns, dur_ns=dur_ns, clock="device", step=4, **more)


# Two hosts whose monotonic clocks differ: host 1 was started 1 s (of wall time) after host 0.
RANK_0: list[Event] = [
    header(0, 5_000_000_000, 3_000_000_000),
    Step(rank=0, step=4, t0_ns=3_000_001_000, dur_ns=9_000, clock="device", sampled=True),
    span(0, "forward", 3_000_001_000, 2_500, chunk=0, micro_batch=1),
    span(0, "reduce_scatter", 3_000_002_000, 3, stream="data", group="data.0", seq=2, num_bytes=8),
    Sums(rank=0, step=4, sums={"forward": {"total_ns": 2500, "count": 1}}),
]
RANK_1: list[Event] = [
    header(1, 5_000_000_000, 2_000_000_000),
    span(1, "forward", 2_000_002_000, 1_000, chunk=0, micro_batch=1),
    Incident(rank=1, name="nonfinite", t_ns=2_000_005_000, step=4, detail={"norm": float("nan")}),
    span(1, "mine", 2_000_004_000, 10, stream="alien"),
]


@pytest.fixture
def drawn(tmp_path: Path) -> Any:
    """Draws events and imports the file, which has to be without fault."""

    def draw(events: Iterable[Event], selection: Selection | None = None) -> Imported:
        path = tmp_path / "trace.json"
        draw_timeline(Events(events), path, selection, align=False)
        found = import_trace(path)
        assert found.faults == []
        return found

    return draw


def spans(found: Imported) -> list[tuple[Any, ...]]:
    events = (one.event for one in found.slices)
    return [(e["pid"], e["name"], e["ts"], e["dur"], e["args"]) for e in events]


def test_values_and_the_wall_clocks_of_two_hosts(drawn: Any) -> None:
    found = drawn(RANK_0 + RANK_1)
    assert spans(found) == [
        (0, "step 4", 0.0, 9.0, {"step": 4}),
        (0, "forward", 0.0, 2.5, {"step": 4, "chunk": 0, "micro_batch": 1}),
        (0, "reduce_scatter", 1.0, 0.003, {"step": 4, "group": "data.0", "seq": 2, "num_bytes": 8}),
        (1, "forward", 1.0, 1.0, {"step": 4, "chunk": 0, "micro_batch": 1}),
        (1, "mine", 3.0, 0.01, {"step": 4}),
    ]
    (incident,) = found.instants
    assert (incident["ts"], incident["args"]) == (4.0, {"norm": "nan", "step": "4"})


def test_names_of_processes_and_threads(drawn: Any) -> None:
    found = drawn(RANK_0 + RANK_1)
    assert found.processes == {
        0: "rank 0 (tp 0, dp 0, pp 0) on node0",
        1: "rank 1 (tp 1, dp 0, pp 0) on node1",
    }
    threads = {(rank, name): number for (rank, number), name in found.threads.items()}
    assert sorted(name for rank, name in threads if rank == 0) == ["compute", "data", "step"]
    assert threads[0, "compute"] == threads[1, "compute"]  # a stream has one number everywhere
    assert threads[1, "alien"] > max(threads[0, "data"], threads[1, "host"])


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_the_same_events_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    draw_timeline(Events(RANK_0 + RANK_1), tmp_path / name)
    shuffled = [*RANK_1, RANK_0[0], *reversed(RANK_0[1:])]
    draw_timeline(Events(shuffled), tmp_path / f"other-{name}")
    assert (tmp_path / name).read_bytes() == (tmp_path / f"other-{name}").read_bytes()
    assert import_trace(tmp_path / name).faults == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"other-{name}"]


def test_compressed_and_plain_are_the_same_trace(tmp_path: Path) -> None:
    for name in ("a.json", "a.json.gz"):
        draw_timeline(Events(RANK_0 + RANK_1), tmp_path / name)
    assert load(tmp_path / "a.json") == load(tmp_path / "a.json.gz")
    assert json.loads((tmp_path / "a.json").read_text()) == load(tmp_path / "a.json.gz")


def test_an_outer_span_comes_before_the_inner_one(drawn: Any) -> None:
    inner, outer = span(0, "inner", 10, 5), span(0, "outer", 10, 50)
    first, second = drawn([inner, outer]).slices
    assert (first.event["name"], second.event["name"]) == ("outer", "inner")
    assert second.parent is first


def test_spans_that_overlap_in_part_go_to_rows_of_their_own(drawn: Any) -> None:
    overlapping = [span(0, f"s{i}", 10 * i, 25) for i in range(6)]
    found = drawn([*overlapping, span(0, "inside", 2, 3), span(0, "behind", 75, 5)])
    rows = {found.threads[0, one.event["tid"]]: one.event["name"] for one in found.slices}
    assert len(found.slices) == 8
    assert set(rows) == {"compute", "compute (2)", "compute (3)"}
    inside = next(one for one in found.slices if one.event["name"] == "inside")
    assert inside.parent is not None
    assert inside.parent.event["name"] == "s0"


def test_spans_that_touch_stay_in_one_row_at_every_nanosecond(drawn: Any) -> None:
    """In microseconds 1.001 times 1000 is 1000.9999999999999: cut, spans would overlap by 1 ns."""
    events = [span(0, "outer", 0, 5_000_003), *(span(0, "s", 7 * i, 7) for i in range(3000))]
    found = drawn(events)
    assert set(found.threads.values()) == {"compute"}
    assert [one.begin_ns for one in found.slices[1:]] == [7 * i for i in range(3000)]
    assert all(one.end_ns - one.begin_ns == 7 for one in found.slices[1:])


def test_a_restarted_rank_uses_the_newer_anchor(drawn: Any) -> None:
    events = [
        *RANK_0[:3],
        header(0, 9_000_000_000, 1_000_000_000),
        span(0, "late", 1_000_000_000, 1),
    ]
    late = drawn(events).slices[-1].event
    assert (late["name"], late["ts"]) == ("late", (9_000_000_000 - 5_000_001_000) / 1000)


def test_no_headers_at_all_is_one_host(drawn: Any) -> None:
    found = drawn([span(2, "forward", 77, 1)])
    assert found.slices[0].begin_ns == 0
    assert found.processes == {2: "rank 2"}
    assert drawn([]).slices == []


def test_ranks_without_a_header_beside_ranks_with_one_are_refused() -> None:
    with pytest.raises(DataError, match=r"ranks \[1\] have no header"):
        Events(RANK_0 + RANK_1[1:])


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    draw_timeline(Events(RANK_0), path)
    before = path.read_bytes()
    source = Events(RANK_0 + RANK_1)
    asked = []

    def failing(ranks: list[int]) -> Any:
        asked.append(ranks)
        if len(asked) == 2:
            raise OSError("gone")
        return Events.records(source, ranks)

    monkeypatch.setattr(source, "records", failing)
    with pytest.raises(OSError, match="gone"):
        draw_timeline(source, path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


# ---------------------------------------------------------------- which ranks


MESH = Mesh(tensor=2, data=2, pipeline=3)


def quiet_world(ranks: Iterable[int] = range(MESH.world_size)) -> list[Event]:
    events: list[Event] = []
    for rank in ranks:
        events += [run_header(MESH, rank, host="node0"), span(rank, "forward", 0, 5)]
    return events


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), list(range(12))),
        (Selection(ranks=[7, 3, 3]), [3, 7]),
        (Selection(view="pipeline", rank=5), [1, 5, 9]),
        (Selection(view="data", rank=5), [5, 7]),
        (Selection(view="tensor", rank=5), [4, 5]),
        (Selection(view="pipeline"), [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]),
        (Selection(view="data", ranks=[0, 1, 2, 3]), [0, 2, 1, 3]),
    ],
)
def test_views(drawn: Any, selection: Selection, expected: list[int]) -> None:
    found = drawn(quiet_world(), selection)
    assert sorted(found.order, key=lambda rank: found.order[rank]) == expected
    assert found.metadata["num_ranks"] == len(expected)


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({"view": "expert"}, "--view is 'expert'; legal: tensor, data, pipeline"),
        ({"rank": 3}, "without --view"),
        ({"rank": 3, "view": "data", "ranks": [3]}, "leave one out"),
        (
            {"rank": 12, "view": "data"},
            r"ranks \[12\] are not of this run, which has ranks 0 to 11",
        ),
        ({"ranks": [3, 99]}, r"ranks \[99\] are not of this run"),
    ],
)
def test_what_no_run_has(tmp_path: Path, selection: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        draw_timeline(Events(quiet_world()), tmp_path / "t.json", Selection(**selection))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_recorded_nothing_is_named(tmp_path: Path) -> None:
    result: Drawn = draw_timeline(Events(quiet_world(range(11))), tmp_path / "t.json")
    assert result.missing == [11]
    assert import_trace(tmp_path / "t.json").metadata["missing_ranks"] == [11]


def test_ranks_as_people_write_them() -> None:
    assert parse_ranks("0-3, 12,5-5") == [0, 1, 2, 3, 12, 5]
    for text in ("", "x", "3-1", "1-", "-1", "1,,2"):
        with pytest.raises(ConfigError, match="legal: numbers and ranges"):
            parse_ranks(text)
