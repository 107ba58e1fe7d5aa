"""What a rank says about itself: events and the progress page (MegaScale 5).

Events (`schema.py`, as lines of JSON in `lines.py`) answer "where did the time go", after the fact
and in detail. The progress page (`page.py`) answers "is it still moving" from outside, also when
the rank is hung. `train` and `cluster` meet through these and nowhere else.
"""

from megascale.events.lines import (
    SCHEMA_VERSION,
    parse_line,
    read_events,
    to_line,
)
from megascale.events.page import (
    COMPLETED_OFFSET,
    PAGE_BYTES,
    PHASES,
    Completed,
    Issued,
    ProgressReader,
    ProgressWriter,
    decode_issued,
    group_id,
    issued_stores,
    pack_completed,
    unpack_completed,
)
from megascale.events.schema import (
    WORK,
    Anchor,
    ClockKind,
    Counters,
    Dropped,
    Event,
    Header,
    Incident,
    Ongoing,
    Span,
    Step,
    Sums,
    run_header,
)

__all__ = [
    "COMPLETED_OFFSET",
    "PAGE_BYTES",
    "PHASES",
    "SCHEMA_VERSION",
    "WORK",
    "Anchor",
    "ClockKind",
    "Completed",
    "Counters",
    "Dropped",
    "Event",
    "Header",
    "Incident",
    "Issued",
    "Ongoing",
    "ProgressReader",
    "ProgressWriter",
    "Span",
    "Step",
    "Sums",
    "decode_issued",
    "group_id",
    "issued_stores",
    "pack_completed",
    "parse_line",
    "read_events",
    "run_header",
    "to_line",
    "unpack_completed",
]
