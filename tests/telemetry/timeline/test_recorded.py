"""The timeline of real runs: both ends of everything that ranks exchange are found.

What the recorder writes and what the arrows look for may drift apart without any other test seeing
it: a span renamed, a sequence number that counts otherwise at one end.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megascale.events import Event, Span, read_events
from megascale.telemetry.timeline import Events, draw_timeline
from tests.telemetry.timeline.importer import import_trace
from tests.train.runs import Layout, train

pytestmark = pytest.mark.full

STEPS = 2
MICRO_BATCHES = 4  # 8 sequences over two data ranks


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ({"tp": 1, "dp": 2, "pp": 2}, []),
        ({"tp": 1, "dp": 2, "pp": 2, "vp": 2}, []),
        ({"tp": 2, "dp": 2, "pp": 1, "zero": 2}, []),
        ({"tp": 1, "dp": 2, "pp": 2}, ["parallelism.pipeline_schedule=zb_h1"]),
        ({"tp": 1, "dp": 2, "pp": 2}, ["parallelism.pipeline_transfers=coupled"]),
    ],
    ids=["1f1b", "interleaved", "tensor", "zero bubble", "coupled"],
)
def test_every_end_finds_its_other(tmp_path: Path, layout: Layout, more: list[str]) -> None:
    run = tmp_path / "run"
    settings = [f"training.steps={STEPS}", "telemetry.span_interval=1", "checkpoint.enable=false"]
    assert train(run, layout, [*settings, *more]) == [None] * 4
    events: list[Event] = []
    for file in sorted((run / "telemetry").glob("rank_*.jsonl")):
        events += read_events(file)
    result = draw_timeline(Events(events), tmp_path / "trace.json")
    found = import_trace(tmp_path / "trace.json")
    assert found.faults == []
    counts = result.arrows
    assert (counts.lost, counts.outside, counts.against_time) == (0, 0, 0)
    arrows = Counter((a.event["name"], b.event["name"]) for a, b in found.arrows)
    sends = Counter(e.op for e in events if isinstance(e, Span) and e.name == "send")
    if layout["pp"] > 1:
        forward = sum(n for (a, b), n in arrows.items() if a == "send" and b == "forward")
        backward = sum(
            n for (a, b), n in arrows.items() if a == "send" and b.startswith("backward")
        )
        assert (forward, backward) == (sends["activation"], sends["gradient"])
        chunks = 2 * layout.get("vp", 1)
        assert sends["activation"] == (chunks - 1) * MICRO_BATCHES * 2 * STEPS
    posts = Counter(
        e.name for e in events if isinstance(e, Span) and e.group == "data" and e.step is not None
    )
    assert posts["grad_sync"] == 2 * arrows["grad_sync", "grad_sync"] > 0
    world = [e for e in events if isinstance(e, Span) and e.group == "world"]
    assert arrows["world_sums", "world_sums"] == len(world) * 3 / 4 > 0
