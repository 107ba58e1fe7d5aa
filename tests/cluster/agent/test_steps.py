"""Line files followed while they grow, are torn, replaced and long."""

from __future__ import annotations

import json
from pathlib import Path

from megascale.cluster.agent.run_files import last_line_end
from megascale.cluster.agent.steps import MOST_BYTES, LineTail
from megascale.cluster.messages import Noticed, StepSums
from megascale.events import Incident, Span, Step, Sums, to_line


def _step(step: int) -> str:
    times = {
        "forward": {"total_ns": 10 * step, "count": 2},
        "grad_sync": {"total_ns": step, "count": 1},
    }
    span = Span(rank=0, name="forward", t0_ns=1, dur_ns=2, clock="host", step=step)
    end = Step(rank=0, step=step, t0_ns=0, dur_ns=12 * step, clock="host", sampled=False)
    return to_line(span) + to_line(Sums(rank=0, step=step, sums=times)) + to_line(end)


def _wanted(step: int) -> StepSums:
    phases = {"forward": 10 * step, "grad_sync": step}
    return StepSums(step=step, total_ns=12 * step, phases=phases)


def test_steps_and_incidents_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    incident = Incident(rank=0, name="nonfinite", t_ns=1, step=3, detail={"parameter": "x"})
    file.write_text(_step(1) + to_line(incident) + _step(2))
    noticed = Noticed(name="nonfinite", step=3, detail={"parameter": "x"})
    assert list(LineTail(file).read()) == [_wanted(1), noticed, _wanted(2)]


def test_every_way_to_cut_the_writes_gives_the_same(tmp_path: Path) -> None:
    text = _step(1) + _step(2)
    for cut in range(0, len(text), 7):
        file = tmp_path / f"lines-{cut}"
        file.write_text(text[:cut])
        tail = LineTail(file)
        found = list(tail.read())
        with file.open("a") as more:
            more.write(text[cut:])
        found += tail.read()
        assert found == [_wanted(1), _wanted(2)]
        assert tail.num_lost == 0


def test_a_torn_line_that_the_next_writer_cuts_off(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text(_step(1) + '{"v":1,"kind":"st')
    tail = LineTail(file)
    assert list(tail.read()) == [_wanted(1)]
    file.write_text(_step(1))  # as LineWriter opens it
    with file.open("a") as more:
        more.write(_step(2))
    assert list(tail.read()) == [_wanted(2)], "nothing twice, nothing lost"


def test_it_begins_where_an_epoch_began(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert last_line_end(file) == 0
    file.write_text(_step(1) + "x" * 10_000)
    offset = last_line_end(file)
    assert offset == len(_step(1))
    tail = LineTail(file, offset)
    file.write_text(_step(1) + _step(2))
    assert list(tail.read()) == [_wanted(2)]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text(_step(1) + _step(2))
    tail = LineTail(file)
    assert len(list(tail.read())) == 2
    file.write_text(_step(9))  # in its place, and shorter
    assert list(tail.read()) == [_wanted(9)]
    other = tmp_path / "other"
    other.write_text(_step(3) + _step(4) + _step(5))
    other.replace(file)
    assert list(tail.read()) == [_wanted(3), _wanted(4), _wanted(5)]


def test_what_is_no_event_is_counted_and_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text('{"v":1,"kind":"step","wrong":1}\n{"v":9,"kind":"sum"}\nnoise\n' + _step(1))
    tail = LineTail(file)
    assert list(tail.read()) == [_wanted(1)]
    assert tail.num_lost == 2


def test_a_call_and_a_detail_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    with file.open("w") as out:
        out.write("x" * (3 * MOST_BYTES) + "\n" + _step(1))
    tail = LineTail(file)
    found = [found for _ in range(5) for found in tail.read()]
    assert found == [_wanted(1)]
    assert tail.num_lost >= 2 * MOST_BYTES
    long = Incident(rank=0, name="a name: odd", t_ns=1, detail={"text": "y" * 100_000})
    file.write_text(to_line(long))
    (noticed,) = LineTail(file).read()
    assert isinstance(noticed, Noticed)
    assert noticed.name == "a_name:_odd"
    assert len(json.dumps(noticed.detail)) < 3_000
