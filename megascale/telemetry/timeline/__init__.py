"""One timeline over all ranks, for Perfetto (MegaScale 5.1, Figure 8).

source.py     what is drawn: a rank after the other      selection.py  which ranks, which order
groups.py     who is meant by "data"                      ends.py       who communicates when
alignment.py  one clock for all hosts                     arrows.py     which ends belong together
lanes.py      spans that overlap                          writer.py     the file
drawing.py    all of it
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
