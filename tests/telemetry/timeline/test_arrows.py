"""Arrows: which ends belong together, and that an end alone gets none and is counted."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megascale.events import Event, Span
from megascale.telemetry.timeline import Events, Selection, draw_timeline
from megascale.topology import Mesh
from tests.telemetry.timeline.importer import Imported, Slice, import_trace
from tests.telemetry.timeline.world import STEP, World

# mesh 1 x 2 x 3: 2 pipelines of 3, 3 micro-batches: 2 * 2 * 3 activations, as many gradients
NUM_TRANSFERS = 24
NUM_COLLECTIVES = 3  # groups of two data ranks, one bucket


def drawn(
    tmp_path: Path, events: list[Event], selection: Selection | None = None
) -> tuple[Imported, dict[str, int]]:
    path = tmp_path / "trace.json"
    result = draw_timeline(Events(events), path, selection, align=False)
    found = import_trace(path)
    assert found.faults == []
    assert len(found.arrows) == result.arrows.arrows
    assert found.metadata["arrows"] == result.arrows.as_json()
    return found, result.arrows.as_json()


def said(one: Slice) -> tuple[Any, ...]:
    arguments = one.event["args"]
    return (
        one.event["pid"],
        one.event["name"],
        arguments.get("chunk"),
        arguments.get("micro_batch"),
    )


def test_a_transfer_leads_to_the_computation_that_it_feeds(tmp_path: Path) -> None:
    found, counts = drawn(tmp_path, World().events())
    assert counts == {
        "arrows": NUM_TRANSFERS + NUM_COLLECTIVES,
        "lost": 0,
        "outside": 0,
        "against_time": 0,
    }
    transfers = {(said(a), said(b)) for a, b in found.arrows if a.event["name"] == "send"}
    expected = set()
    for dp in range(2):
        for m in range(3):
            for stage in range(2):
                left, right = dp + 2 * stage, dp + 2 * (stage + 1)
                expected.add(((left, "send", stage, m), (right, "forward", stage + 1, m)))
                expected.add(((right, "send", stage + 1, m), (left, "backward", stage, m)))
    assert transfers == expected


def test_members_of_a_collective_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    world = World(Mesh(1, 4, 1), begin_ns={0: 900, 1: 0, 2: 4000, 3: 100})
    found, counts = drawn(tmp_path, world.events())
    assert [(a.event["pid"], b.event["pid"]) for a, b in found.arrows] == [(1, 3), (3, 0), (0, 2)]
    assert {a.event["name"] for pair in found.arrows for a in pair} == {"grad_sync"}
    assert counts["arrows"] == 3


@pytest.mark.parametrize("order", [None, Selection(view="data"), Selection(view="pipeline")])
def test_arrows_between_spans_that_begin_at_one_instant(
    tmp_path: Path, order: Selection | None
) -> None:
    """Then the order in the file decides, and a viewer has to meet the begin first."""
    zero = [_at_zero(event) for event in World().events()]
    _, counts = drawn(tmp_path, zero, order)
    assert counts["arrows"] == NUM_TRANSFERS + NUM_COLLECTIVES


def _at_zero(event: Event) -> Event:
    return Span(**{**_fields(event), "t0_ns": 7, "dur_ns": 9}) if isinstance(event, Span) else event


def _fields(span: Span) -> dict[str, Any]:
    return {name: getattr(span, name) for name in Span.__slots__}


@pytest.mark.parametrize("seed", range(8))
def test_events_that_were_lost_leave_no_arrow_with_one_end(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    whole = World().events()
    kept = [e for e in whole if not isinstance(e, Span) or generator.random() > 0.2]
    _, counts = drawn(tmp_path, kept)
    there = Counter(
        (e.name, e.rank, e.op, e.seq) for e in kept if isinstance(e, Span) and e.group is not None
    )
    ends = sum(there.values())
    assert ends < 2 * (NUM_TRANSFERS + NUM_COLLECTIVES)
    assert ends == 2 * (counts["arrows"] + counts["against_time"]) + counts["lost"]


def test_ranks_that_are_not_drawn_are_told_from_ends_that_are_lost(tmp_path: Path) -> None:
    events = World().events()
    _, counts = drawn(tmp_path, events, Selection(view="pipeline", rank=2))  # ranks 0, 2, 4
    assert counts == {"arrows": 12, "lost": 0, "outside": 3, "against_time": 0}
    without = [event for event in events if event.rank != 2]
    _, counts = drawn(tmp_path, without, Selection(view="pipeline", rank=0))
    # of rank 0: 3 sends and 3 receives; of rank 4 as many; data groups as before but rank 2's
    assert counts == {"arrows": 0, "lost": 12, "outside": 2, "against_time": 0}


def test_what_was_used_before_it_was_sent_gets_no_arrow(tmp_path: Path) -> None:
    late = World().events(clock_ns={"host00": 10**9})  # the clock of stage 0 is a second ahead
    _, counts = drawn(tmp_path, late)
    assert counts["against_time"] == 3
    assert counts["arrows"] == NUM_TRANSFERS + NUM_COLLECTIVES - 3


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    once = World().events()
    again = [
        e for e in World(begin_ns=dict.fromkeys(range(6), 10**6)).events() if isinstance(e, Span)
    ]
    found, counts = drawn(tmp_path, [*once, *again])
    assert counts["arrows"] == NUM_TRANSFERS + NUM_COLLECTIVES
    begins = sorted({one.begin_ns for pair in found.arrows for one in pair})
    assert begins[0] >= 10**6  # those of the second time


def test_spans_without_a_step_or_a_number_have_no_counterpart(tmp_path: Path) -> None:
    plain = Span(rank=0, name="send", t0_ns=0, dur_ns=1, clock="host", group="0->1 activation")
    headers = [event for event in World().events() if not isinstance(event, Span)]
    other = Span(**{**_fields(plain), "seq": 1, "step": STEP, "group": "nobody's"})
    _, counts = drawn(tmp_path, [*headers, plain, other])
    assert set(counts.values()) == {0}


def test_transfers_that_name_their_peer(tmp_path: Path) -> None:
    """What another program records: it has no stages, but says who is at the other end."""
    headers = [e for e in World(Mesh(1, 2, 1)).events() if not isinstance(e, Span)]
    both = {"clock": "host", "step": STEP, "seq": 4, "payload": "tokens"}
    send = Span(rank=1, name="send", t0_ns=100, dur_ns=5, peer=0, **both)  # type: ignore[arg-type]
    receive = Span(rank=0, name="recv", t0_ns=104, dur_ns=9, peer=1, **both)  # type: ignore[arg-type]
    found, counts = drawn(tmp_path, [*headers, send, receive])
    assert counts["arrows"] == 1
    ((begin, end),) = found.arrows
    assert (begin.event["pid"], end.event["pid"], begin.event["name"]) == (1, 0, "send")
