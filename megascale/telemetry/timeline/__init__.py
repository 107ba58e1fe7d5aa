"""One timeline over all ranks, for Perfetto (MegaScale 5.1, Figure 8).

    source.py     what is drawn: a rank after the other   stored.py   that of a run's store
    selection.py  which ranks, in which order             groups.py   who is meant by "data"
    ends.py       who communicates when                   arrows.py   which ends belong together
    alignment.py  one clock for all hosts                 lanes.py    spans that overlap
    rows.py       a rank in the trace format              drawing.py  all of it
    command.py    `megascale trace`                       (the file: megascale/trace.py)

Times are wall-clock ns from the source to the file, whose own are microseconds.
"""

from megascale.telemetry.timeline.drawing import Drawn, draw_timeline
from megascale.telemetry.timeline.selection import Selection, parse_ranks
from megascale.telemetry.timeline.source import Events, RankRecord, Source

__all__ = [
    "Drawn",
    "Events",
    "RankRecord",
    "Selection",
    "Source",
    "draw_timeline",
    "parse_ranks",
]
