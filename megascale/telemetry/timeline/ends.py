"""Ends of communication: the spans of a rank that have a counterpart on another rank.

An end is of a collective (`group`, `seq`), a send, or a receive. What has equal codes, steps,
sequence numbers and checks belongs together. As columns of numbers an end costs 90 bytes, so those
of all ranks fit in memory where their spans do not.

Where an arrow into a receive points: at the computation that the value feeds, for that is who
waited; where it was not recorded, at the wait, or at the receive itself.

When a member was *through* is another question, asked by the alignment of clocks, and the span's
own end answers it only where the span blocks: one that posts a transfer ends at once, so there it
is the end of the span that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale.events import Span
from megascale.telemetry.timeline.groups import Groups, Members

Columns = NDArray[np.int64]

COLLECTIVE, SEND, RECEIVE = 0, 1, 2
NONE = -1

# Spans that post a transfer of a group; a span of the same name waits for it.
_POSTS = frozenset({"grad_sync", "param_gather", "world_sums"})
_WAITS = frozenset({"wait", "finish"})
# Spans that end when all members have contributed. (In a broadcast or a reduce some need not wait,
# and `tp_weight_gather` only waits for what another span posted.)
_BLOCKING = frozenset({"tp_all_gather_gemm", "tp_gemm_reduce_scatter", "tp_all_reduce"})
_CONSUMERS = {
    "activation": ("forward", "head"),
    "gradient": ("backward", "backward_input"),
}
_WAIT_OPS = {"activation": "RA", "gradient": "RG"}  # `op` of a `pp_wait`


class End(NamedTuple):
    """One end. `span` counts the rank's spans in their order; NONE: not known, or no such span.

    check       what both ends of a transfer say of it: chunk of the receiver, micro-batch
    through_ns  when this member had what it communicated for
    into_*      the span at which an arrow into a receive points
    """

    rank: int
    kind: int
    code: int
    step: int
    seq: int
    span: int
    t0_ns: int
    check: int
    through_ns: int
    into_span: int
    into_t0_ns: int


FIELDS = End._fields


@dataclass(frozen=True)
class Code:
    """What a code stands for. members: who takes part; of a transfer its source and destination."""

    name: str
    members: Members


class Collector:
    """Takes ranks one after the other; `columns` has a row an end."""

    def __init__(self, groups: Groups) -> None:
        self.codes: list[Code] = []
        self.num_without_group = 0
        self._groups = groups
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._parts: list[Columns] = []

    def add(self, rank: int, spans: Sequence[Span]) -> None:
        through = _through(spans)
        consumers = _consumers(spans)
        ends: dict[tuple[int, ...], End] = {}
        for index, span in enumerate(spans):
            end = self._end(rank, index, span, through, consumers)
            if end is not None:  # of a step that was done again the newest counts
                ends[end.kind, end.code, end.step, end.seq, end.check] = end
        if ends:
            self._parts.append(np.array(list(ends.values()), dtype=np.int64))

    def columns(self) -> dict[str, Columns]:
        whole = np.concatenate(self._parts) if self._parts else np.empty((0, len(FIELDS)), np.int64)
        return {name: np.ascontiguousarray(whole[:, i]) for i, name in enumerate(FIELDS)}

    def _end(
        self,
        rank: int,
        index: int,
        span: Span,
        through: dict[int, int],
        consumers: dict[tuple[Any, ...], list[tuple[int, Span]]],
    ) -> End | None:
        if span.step is None or (span.group is None and span.peer is None) or span.seq is None:
            return None
        direction = _direction(span)
        if direction is not None:
            return self._transfer(rank, index, span, direction, consumers)
        if span.group is None:
            return None
        members = self._groups.of(span.group, rank)
        if members is None:
            self.num_without_group += 1
            return None
        if len(members) == 1:
            return None
        name = span.name if span.op is None else f"{span.name} {span.op}"
        code = self._number(
            ("collective", name, span.bucket, span.group, members[0]), name, members
        )
        ready = through.get(index, NONE)
        return End(
            *(rank, COLLECTIVE, code, span.step, span.seq, index, span.t0_ns),
            *(NONE, ready, index, span.t0_ns),
        )

    def _transfer(
        self,
        rank: int,
        index: int,
        span: Span,
        direction: int,
        consumers: dict[tuple[Any, ...], list[tuple[int, Span]]],
    ) -> End | None:
        assert span.step is not None
        assert span.seq is not None
        pair = self._pair(rank, span, direction)
        if pair is None:
            self.num_without_group += 1
            return None
        payload = _payload(span)
        code = self._number(("transfer", payload, pair), payload, pair)
        into, ready = (index, span), NONE
        if direction == RECEIVE:
            into, ready = _into(index, span, payload, consumers)
        return End(
            *(rank, direction, code, span.step, span.seq, index, span.t0_ns),
            *(_check(span, direction, payload), ready, into[0], into[1].t0_ns),
        )

    def _pair(self, rank: int, span: Span, direction: int) -> tuple[int, int] | None:
        if span.peer is not None:
            return (rank, span.peer) if direction == SEND else (span.peer, rank)
        assert span.group is not None
        pair = self._groups.channel(span.group, rank)
        return pair if pair is not None and pair[direction - SEND] == rank else None

    def _number(self, key: tuple[Any, ...], name: str, members: Members) -> int:
        number = self._numbers.setdefault(key, len(self.codes))
        if number == len(self.codes):
            self.codes.append(Code(name, members))
        return number


def _direction(span: Span) -> int | None:
    for word in (span.name, span.op):
        if word in ("send", "recv"):
            return SEND if word == "send" else RECEIVE
    return None


def _payload(span: Span) -> str:
    return span.payload or (span.op if span.op in _CONSUMERS else None) or "transfer"


def _check(span: Span, direction: int, payload: str) -> int:
    """A chunk's activation arrives for the next chunk, its gradient for the one before."""
    if span.chunk is None or span.micro_batch is None:
        return NONE
    shift = {"activation": 1, "gradient": -1}.get(payload, 0) if direction == SEND else 0
    return (span.chunk + shift + 1) << 32 | span.micro_batch


def _consumers(spans: Sequence[Span]) -> dict[tuple[Any, ...], list[tuple[int, Span]]]:
    """Computations and waits by what they are of, each with its index."""
    found: dict[tuple[Any, ...], list[tuple[int, Span]]] = {}
    names = {"pp_wait", *(name for group in _CONSUMERS.values() for name in group)}
    for index, span in enumerate(spans):
        if span.name in names:
            word = span.op if span.name == "pp_wait" else None
            key = (span.name, word, span.step, span.chunk, span.micro_batch)
            found.setdefault(key, []).append((index, span))
    return found


def _into(
    index: int,
    span: Span,
    payload: str,
    consumers: dict[tuple[Any, ...], list[tuple[int, Span]]],
) -> tuple[tuple[int, Span], int]:
    """Where an arrow into the receive `span` points, and when the value was there."""

    def first(name: str, op: str | None = None) -> tuple[int, Span] | None:
        found = consumers.get((name, op, span.step, span.chunk, span.micro_batch), [])
        return next((one for one in found if _end(one[1]) > span.t0_ns), None)

    wait = first("pp_wait", _WAIT_OPS.get(payload))
    computes = [found for name in _CONSUMERS.get(payload, ()) if (found := first(name)) is not None]
    compute = min(computes, key=lambda one: one[1].t0_ns) if computes else None
    if wait is not None:
        return compute or wait, _end(wait[1])
    if compute is not None:
        return compute, compute[1].t0_ns
    return (index, span), NONE


def _through(spans: Sequence[Span]) -> dict[int, int]:
    """By index of a collective's span: when its result was there on this rank."""
    through: dict[int, int] = {}
    posted: dict[str, dict[str | None, int]] = {}
    moments: list[tuple[int, bool, int]] = []  # a post counts from its begin, a wait at its end
    for index, span in enumerate(spans):
        if span.name in _BLOCKING and span.group is not None:
            through[index] = _end(span)
        elif span.name in _POSTS:
            is_wait = span.op in _WAITS
            moments.append((_end(span) if is_wait else span.t0_ns, is_wait, index))
    for _, is_wait, index in sorted(moments):
        span = spans[index]
        open_posts = posted.setdefault(span.name, {})
        if not is_wait:
            open_posts[span.bucket] = index
        elif span.bucket is None:
            through.update((post, _end(span)) for post in open_posts.values())
            open_posts.clear()
        elif span.bucket in open_posts:
            through[open_posts.pop(span.bucket)] = _end(span)
    return through


def _end(span: Span) -> int:
    return span.t0_ns + span.dur_ns
