"""Spans of a window as columns, for the timeline. Names are numbers into a table of strings.

200,000 spans are 9 MB as columns, 40 as objects, and nobody can look at more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megascale.events import Span
from megascale.telemetry.dashboard.answers import Body, RefusedError, json_body
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.shown import counted
from megascale.telemetry.store.run import Run

MOST_RANKS = 512
MOST_SPANS = 200_000
_TEXTS = ("name", "stream", "op", "group", "payload", "bucket")
_NUMBERS = ("step", "chunk", "micro_batch", "seq", "peer", "num_bytes")


def sampled_steps(run: Run, most: int = 500) -> list[int]:
    """The newest steps of which any rank has spans, ascending."""
    table = run.query(
        "SELECT DISTINCT step FROM steps WHERE sampled ORDER BY step DESC LIMIT ?", [most]
    )
    return sorted(int(step) for step in table.column("step").to_pylist())


def spans(run: Run, window: Window) -> Body:
    """Spans of `window`; without steps those of the newest sampled one.

    Times are microseconds since `base_unix_ns`. RefusedError (422): more ranks or spans than can be
    drawn.
    """
    ranks = run.places.rank_R.tolist() if window.ranks is None else list(window.ranks)
    if len(ranks) > MOST_RANKS:
        raise RefusedError(
            422, f"spans of {len(ranks)} ranks; ask for {MOST_RANKS} at most, such as ranks=0-7"
        )
    sampled = sampled_steps(run)
    first, last = _steps(window, sampled)
    found = [] if first is None or last is None else run.spans(first, last, ranks=ranks)
    if len(found) > MOST_SPANS:
        raise RefusedError(
            422,
            f"steps {first} to {last} of {counted(len(ranks), 'rank')} hold "
            f"{counted(len(found), 'span')}; ask for fewer "
            f"steps or ranks: {MOST_SPANS} at most",
        )
    return json_body({"first": first, "last": last, "sampled": sampled, **columns(found)})


def columns(found: Sequence[Span]) -> dict[str, Any]:
    """`found` as columns."""
    base_ns = min((span.t0_ns for span in found), default=0)
    numbers: dict[str, int] = {}
    out: dict[str, Any] = {
        "base_unix_ns": str(base_ns),  # more than a JavaScript number holds
        "rank": [span.rank for span in found],
        "t0_us": [(span.t0_ns - base_ns) // 100 / 10 for span in found],
        "dur_us": [span.dur_ns // 100 / 10 for span in found],
        "issued_us": [
            None if span.issued_ns is None else (span.issued_ns - base_ns) // 100 / 10
            for span in found
        ],
    }
    for field in _TEXTS:
        out[field] = [_number(numbers, getattr(span, field)) for span in found]
    for field in _NUMBERS:
        out[field] = [getattr(span, field) for span in found]
    out["strings"] = list(numbers)
    return out


def _steps(window: Window, sampled: Sequence[int]) -> tuple[int | None, int | None]:
    if window.first_step is None and window.last_step is None:
        return (sampled[-1], sampled[-1]) if sampled else (None, None)
    first = window.last_step if window.first_step is None else window.first_step
    return first, first if window.last_step is None else window.last_step


def _number(numbers: dict[str, int], text: str | None) -> int | None:
    return None if text is None else numbers.setdefault(text, len(numbers))
