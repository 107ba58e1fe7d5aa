"""Loading format 2 (MegaScale 4.4): every byte is read from the storage once, by one rank, checked
against its hash before anything of it is used, and sent to whoever else needs it.

    saved.py        where the pieces of a checkpoint lie; how another model is refused
    plan.py         pure: which rank reads which block, who is sent which bytes, in which round
    files.py        the files that a manifest tells of: sizes, headers, blocks
    shared_plan.py  from files and wants to a plan that all ranks share
    window.py       threads that read blocks ahead, checked, in bounded memory
    exchange.py     the loading: copies into the pieces, messages, and why nobody waits for ever
    messages.py     sends and receives that name the peer that is gone
    outcome.py      how a load ended, agreed by all ranks

`megascale/checkpoint/load.py` is the way in.
"""

from __future__ import annotations

from megascale.checkpoint.reading.exchange import copy_parts, read_block, read_pieces
from megascale.checkpoint.reading.files import Files
from megascale.checkpoint.reading.messages import lost_peers
from megascale.checkpoint.reading.outcome import gather
from megascale.checkpoint.reading.plan import Limits, Needs, RankPlan
from megascale.checkpoint.reading.saved import Saved, Want, wants_of
from megascale.checkpoint.reading.shared_plan import PlanCache
from megascale.checkpoint.reading.window import DamagedError, Window

__all__ = [
    "DamagedError",
    "Files",
    "Limits",
    "Needs",
    "PlanCache",
    "RankPlan",
    "Saved",
    "Want",
    "Window",
    "copy_parts",
    "gather",
    "lost_peers",
    "read_block",
    "read_pieces",
    "wants_of",
]
