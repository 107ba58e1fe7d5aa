"""In which collective or transfer a rank stands, seen from another thread of it (MegaScale 5.2).

On the host's clock: the open span that started last, if it is an operation of a group or a wait on
one. A device that the host has run ahead of stands between the marks of spans that the host left
long ago: in the span whose first mark it has passed and whose end it has not; where it has passed
all of them, the rank stands where its host does. A rank that computes stands in none of them and is
not waiting, whoever waits for it.

Waits have no number of their own. A receive's is that of its post; of others it is the last that
was handed out in the group, which is where a rank must have come that this one waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from megascale.events import PHASES
from megascale.telemetry.spans import OpenSpan, UnderWay

WAITS: Mapping[tuple[str, str | None], tuple[str, str]] = {
    ("grad_sync", "finish"): ("data", "grad_sync"),
    ("tied_sum", None): ("embedding", "grad_sync"),
    ("world_sums", "wait"): ("world", "grad_sync"),
    ("norm_sum", "data"): ("data", "optimizer"),
    ("norm_sum", "tensor"): ("tensor", "optimizer"),
    ("norm_sum", "pipeline"): ("pipeline", "optimizer"),
    ("param_gather", "wait"): ("data", "param_gather"),
    ("pp_wait", "RA"): ("pipeline", "recv"),
    ("pp_wait", "RG"): ("pipeline", "recv"),
    ("pp_wait", "all"): ("pipeline", "recv"),
    ("pp_wait", "head"): ("head", "head"),
    ("pp_finish", None): ("pipeline", "send"),
}
"""Name and `op` of a wait -> its group and its phase. Of a receive the channel is told by its post;
where none is known (coupled transfers, the wait for all sends) "pipeline" means any neighbour."""

UNNUMBERED = frozenset({"norm_sum", "tied_sum"})
"""Sums that nobody counts: who stands in one has come to it, who does not has not."""

_RECEIVED = {"RA": "activation", "RG": "gradient"}
_WORK = frozenset(
    {
        *("forward", "backward", "backward_input", "backward_weight", "optimizer", "grad_norm"),
        *("head", "data_wait", "gc", "op_forward", "op_backward", "validation", "checkpoint"),
    }
)


@dataclass(frozen=True)
class Standing:
    """The span a rank stands in, and what is known of it; fields as in `events.Ongoing`.

    since_ns  on the host's clock; of a device, when it came there
    """

    span: OpenSpan
    since_ns: int
    step: int | None
    phase: str | None
    chunk: int | None
    micro_batch: int | None
    group: str
    seq: int | None
    posted: Mapping[str, int]


def standing(seen: UnderWay, *, of_host: bool = False) -> Standing | None:
    """Where the rank waits, or None where it computes or does nothing that is a span.

    of_host  where the host stands, also if it has run ahead of a device
    """
    on_device = seen.clock.kind == "device" and not of_host
    inside = list(_on_device(seen) if on_device else seen.open)
    if on_device and not inside:  # it has nothing to do: where the rank waits, its host does
        return standing(seen, of_host=True)
    told = (span for span in reversed(inside) if waits(span) or computes(span))
    span = next(told, None)  # what lies inside of it is a detail
    if span is None or not waits(span):
        return None
    posted = _passed(seen) if on_device else dict(seen.latest)
    group, seq, phase = _operation(span, seen, posted)
    enclosing = next((one for one in reversed(inside) if one.name in PHASES), span)
    fields, around = span.fields, enclosing.fields
    return Standing(
        span=span,
        since_ns=_since_ns(span) if on_device else span.since_ns,
        step=seen.step,
        phase=phase or (enclosing.name if enclosing.name in PHASES else None),
        chunk=fields.get("chunk", around.get("chunk")),
        micro_batch=fields.get("micro_batch", around.get("micro_batch")),
        group=group,
        seq=seq,
        posted=posted,
    )


def waits(span: OpenSpan) -> bool:
    """Is it an operation of a group, or a wait on one?"""
    fields = span.fields
    return fields.get("group") is not None or (span.name, fields.get("op")) in WAITS


def computes(span: OpenSpan) -> bool:
    """Is it the rank's own work? What is neither this nor a wait is a detail of what is around."""
    return span.name in _WORK


def _operation(
    span: OpenSpan, seen: UnderWay, posted: Mapping[str, int]
) -> tuple[str, int | None, str | None]:
    """Its group, number and phase."""
    group: str | None = span.fields.get("group")
    if group is not None:
        return group, span.fields["seq"], None
    group, phase = WAITS[span.name, span.fields.get("op")]
    if group == "pipeline" and (post := _post_of(span, seen)) is not None:
        return post.fields["group"], post.fields["seq"], phase
    return group, None if span.name in UNNUMBERED else posted.get(group), phase


def _post_of(span: OpenSpan, seen: UnderWay) -> OpenSpan | None:
    """The receive that `span` waits for."""
    payload, fields = _RECEIVED.get(span.fields.get("op", "")), span.fields
    wanted = ("recv", payload, fields.get("chunk"), fields.get("micro_batch"))
    for other in reversed(list(_all(seen))):
        of = other.fields
        if (other.name, of.get("op"), of.get("chunk"), of.get("micro_batch")) == wanted:
            return other
    return None


# ---------------------------------------------------------------- on a device


def _on_device(seen: UnderWay) -> Iterator[OpenSpan]:
    """Spans that the device is in, in the order in which the host began them."""
    ready = seen.clock.ready
    inside = [
        span
        for span, last in chain.from_iterable(seen.ended)
        if span.clock.kind == "device" and not ready(last) and ready(span.first)
    ]
    inside += [
        span
        for span in seen.open
        if span.clock.kind == "device" and span.first is not None and ready(span.first)
    ]
    return iter(sorted(inside, key=lambda span: span.since_ns))


def _passed(seen: UnderWay) -> dict[str, int]:
    """The last operation of each group that the device has come to."""
    passed = dict(seen.latest)
    for span in _all(seen):
        group = span.fields.get("group")
        if group is None or span.clock.kind != "device" or span.first is None:
            continue
        if not seen.clock.ready(span.first):
            passed[group] = min(passed[group], span.fields["seq"] - 1)
    return passed


def _since_ns(span: OpenSpan) -> int:
    return span.clock.interval(span.first, span.first)[0]


def _all(seen: UnderWay) -> Iterator[OpenSpan]:
    """In the order of their ends; open ones last."""
    yield from (span for span, _ in chain.from_iterable(seen.ended))
    yield from seen.open
