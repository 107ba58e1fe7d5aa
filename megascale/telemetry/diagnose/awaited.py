"""Which transfer of the pipeline a rank waits for, and whether its neighbour is past sending it.

A stack says in which computation a rank waits for its input: a forward for an activation from the
stage before, a backward for a gradient from the stage behind. Two neighbours may wait for each
other only where one of them left a send out, or the network lost it; then their pages, which hold
the micro-batch that each did last, tell who. In every schedule a stage has sent a micro-batch's
activation before it waits for its gradient, and micro-batches of a chunk come in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from megascale.telemetry.diagnose.places import (
    AHEAD,
    BEHIND,
    UNKNOWN,
    RankView,
    body_is_over,
)

Awaited = Literal["activation", "gradient", "nothing"]
_BEHIND = frozenset({"finish_gradients", "finish_update"})
_INPUTS: tuple[
    tuple[str, Awaited], ...
] = (  # the function that called `_received` -> what it waits for
    ("_output_gradient", "gradient"),
    ("_backward", "gradient"),
    ("_input_gradient", "gradient"),
    ("_forward", "activation"),
)


def awaited(frames: Sequence[str]) -> Awaited | None:
    """The payload for which a rank with this stack waits; "nothing": it is behind the last transfer
    of its step; None: neither is to be seen."""
    names = [frame.split(" (", 1)[0].rsplit(".", 1)[-1] for frame in frames]
    if any(
        name in _BEHIND or "/optim/" in frame for name, frame in zip(names, frames, strict=True)
    ):
        return "nothing"
    if any("_start_world_sums" in frame for frame in frames):
        return "nothing"
    if "_received" not in names[:6]:
        return None
    callers = names[names.index("_received") + 1 :]
    return next((payload for name, payload in _INPUTS if callers[:1] == [name]), None)


def has_sent(
    waiter: RankView,
    other: RankView,
    payload: str,
    other_stands: Awaited | None,
    payload_of: Mapping[int, str],
) -> int:
    """Is `other` AHEAD of sending what `waiter` waits for, BEHIND it, or is that UNKNOWN?

    other_stands  of `other`, by its stack
    payload_of    as `places.order` takes it
    """
    if other.step != waiter.step:
        return AHEAD if other.step > waiter.step else BEHIND
    if body_is_over(other) or other_stands == "nothing":
        return AHEAD
    if payload == "gradient":
        return _is_past(waiter, other, other_stands, payload_of)
    if other_stands == "gradient":  # it owes an activation, unless it is owed the gradient first
        return -_is_past(other, waiter, "activation", payload_of)
    return UNKNOWN


def _is_past(
    before: RankView, behind: RankView, awaits: Awaited | None, payload_of: Mapping[int, str]
) -> int:
    """Has the stage `behind`, which awaits that, sent the gradient that stage `before` awaits?"""
    if before.chunk is None or behind.chunk != before.chunk + 1:
        return UNKNOWN
    got = _backwards(before, "gradient", payload_of)
    sent = _backwards(behind, awaits, payload_of)
    if got is None or sent is None:
        return UNKNOWN
    return AHEAD if sent > got else BEHIND


def _backwards(view: RankView, awaits: Awaited | None, payload_of: Mapping[int, str]) -> int | None:
    """Backward passes of its chunk that a rank has done which awaits its next input. A receive is
    on the page before the computation that precedes the one it feeds."""
    payload = payload_of.get(view.group_id or 0)
    if view.micro_batch is None or awaits not in ("activation", "gradient"):
        return None
    if view.phase in ("backward", "backward_input") or (view.phase, payload) == (
        "send",
        "gradient",
    ):
        return view.micro_batch + 1
    if (view.phase, payload) == ("recv", "gradient"):
        return view.micro_batch - (awaits == "gradient")
    return None
