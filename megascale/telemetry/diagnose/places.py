"""Where in its program a rank is, and which of two ranks is further, from their progress pages.

Ranks of one pipeline stage run one program: the same computations and collectives in the same
order. A page holds only the last collective and the last phase, so two places can often be ordered
and sometimes not; what is not certain is `UNKNOWN`, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale.events import group_id

BEHIND, UNKNOWN, AHEAD = -1, 0, 1

STOPPED, DEAD, UNINTERRUPTIBLE = frozenset("Tt"), frozenset("ZX"), "D"
"""States of /proc/PID/stat: stopped by a signal or a tracer, no longer there, in the kernel."""

WORLD, _DATA, _TENSOR = group_id("world"), group_id("data"), group_id("tensor")
PAYLOADS = ("activation", "gradient")
_AFTER_BODY = frozenset({"optimizer", "checkpoint", "validation", "gc", "done"})
_FORWARD, _BACKWARD = "forward", ("backward", "backward_input")


@dataclass(frozen=True)
class RankView:
    """What is known of a rank at one moment; fields as in `events.Issued` and /proc/PID/stat.

    age_s           since the host last issued anything, at one moment for all ranks (the age that
                    the agent sent plus the time since it came)
    completed_step  what the device last finished
    alive           False: the process has ended
    recorded        largest number of a collective in each group, by the group's name, as flight
                    recorders count them (never their state: gloo calls a timed out one retired)
    """

    epoch: int = 0
    step: int = 0
    phase: str = "init"
    micro_batch: int | None = None
    chunk: int | None = None
    group_id: int | None = None
    seq: int | None = None
    age_s: float = 0.0
    completed_step: int | None = None
    os_state: str | None = None
    alive: bool = True
    recorded: Mapping[str, int] = field(default_factory=dict)

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for two ranks of a stage that stand at the same place of the program."""
        return (self.step, self.phase, self.chunk, self.micro_batch, self.group_id, self.seq)


def order(one: RankView, other: RankView, *, payload_of: Mapping[int, str]) -> int:
    """Is `one` AHEAD of `other`, BEHIND it, or is that UNKNOWN? Of ranks of one stage.

    payload_of  "activation" or "gradient" by the number of a pipeline channel
    """
    found = coarse_order(one, other)
    if found != UNKNOWN:
        return found
    if one.group_id == other.group_id and one.seq is not None and other.seq is not None:
        found = _sign(one.seq - other.seq)
        if found != UNKNOWN:
            return found
    if one.chunk is None or one.chunk != other.chunk:
        return UNKNOWN
    if one.micro_batch is None or other.micro_batch is None:
        return UNKNOWN
    return _order_in_chunk(_pass(one, payload_of), _pass(other, payload_of), one, other)


def coarse_order(one: RankView, other: RankView) -> int:
    """The same of any two ranks: by step, and by the part of the step."""
    if one.step != other.step:
        return _sign(one.step - other.step)
    (first, last), (other_first, other_last) = _parts(one), _parts(other)
    return int(first > other_last) - int(last < other_first)


def body_is_over(view: RankView) -> bool:
    """Behind the pipeline's last transfer of its step: it waits for no neighbour there."""
    return _parts(view)[0] >= 2


def cannot_wait_for_neighbour(view: RankView, *, last_chunk: int) -> bool:
    """Inside a computation whose result is sent right after it: the send would be on the page. With
    reductions under way, a tensor group's collective is in the last backward, or behind the body.
    """
    if view.phase == _FORWARD:
        return view.chunk is not None and view.chunk < last_chunk
    if view.phase in _BACKWARD:
        return view.chunk is not None and view.chunk > 0
    if view.phase == "grad_sync":
        return view.group_id == _TENSOR
    return view.phase == "data_wait"


def waits_in_last_collective(view: RankView) -> bool:
    """False where the world's last sums are those of the step before: nobody waits for them."""
    return not (view.group_id == WORLD and view.phase in ("data_wait", _FORWARD))


def may_wait_unseen(view: RankView) -> bool:
    """In a phase that waits for what is not on the page: gradients, norms, parameters."""
    return view.phase not in (_FORWARD, *_BACKWARD, "backward_weight", "data_wait", "send", "recv")


def channels(stages: int) -> dict[int, tuple[int, int, str]]:
    """(source, destination, payload) of the pipeline's channels, by their number on a page."""
    found = {}
    for source in range(stages):
        for destination in {(source + 1) % stages, (source - 1) % stages} - {source}:
            for payload in PAYLOADS:
                name = f"{source}->{destination} {payload}"
                found[group_id(name)] = (source, destination, payload)
    return found


def _parts(view: RankView) -> tuple[int, int]:
    """First and last part of the step in which it may be: 0: waiting for data, 1: the pipeline's
    body, 2: behind the world's sums, 3: updating and later. Phases last until another begins, and
    collectives of tensor groups come in every part."""
    if view.phase == "data_wait":
        return 0, 0
    if view.phase in _AFTER_BODY:
        return 3, 3
    if view.phase in ("param_gather", "other", "init"):
        return 1, 3
    if view.group_id == WORLD and view.phase != _FORWARD:
        return 2, 2
    return (1, 2) if view.phase == "grad_sync" and view.group_id != _DATA else (1, 1)


def _pass(view: RankView, payload_of: Mapping[int, str]) -> tuple[str, str] | None:
    """(forward or backward, compute or send or recv) of a place in the body."""
    if view.phase == _FORWARD:
        return _FORWARD, "compute"
    if view.phase in _BACKWARD:
        return "backward", "compute"
    payload = payload_of.get(view.group_id or 0)
    if view.phase not in ("send", "recv") or payload is None:
        return None
    return (_FORWARD if payload == "activation" else "backward"), view.phase


def _order_in_chunk(
    first: tuple[str, str] | None, second: tuple[str, str] | None, one: RankView, other: RankView
) -> int:
    """By micro-batch, within a pass; a micro-batch's forward lies before its backward. A receive
    is posted before what it feeds, nobody knows how long before."""
    if first is None or second is None:
        return UNKNOWN
    assert one.micro_batch is not None, one
    assert other.micro_batch is not None, other
    behind = _is_before(first, one.micro_batch, second, other.micro_batch)
    ahead = _is_before(second, other.micro_batch, first, one.micro_batch)
    return int(ahead) - int(behind)


def _is_before(first: tuple[str, str], m: int, second: tuple[str, str], other_m: int) -> bool:
    (pass_, kind), (other_pass, other_kind) = first, second
    if other_kind == "recv":
        return kind == "recv" and pass_ == other_pass and m < other_m
    if pass_ == other_pass:
        rank = ("recv", "compute", "send").index
        return m < other_m or (m == other_m and rank(kind) < rank(other_kind))
    return pass_ == _FORWARD and m <= other_m


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
