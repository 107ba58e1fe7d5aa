"""Which communication is in flight during which computation, proved from a run's events. Pure.

The order in which a rank launched things is the order of its spans: on a CPU that of the host's
clock, on a device that of the compute stream, behind which a transfer waits until it is posted and
which waits where the transfer's result is needed. So what lies between the span that posts a
transfer and the one that waits for it is what hides it, whatever the machine's speed.

`findings` is empty where every overlap of MegaScale 3.2 is there:
* data      a bucket's gradients are posted before computation that does not need them, all but the
            last; parameters are waited for inside the forward that reads them
* pipeline  a receive is posted before the computation ahead of the one that it feeds, weights'
            halves not counted; a value is sent before the next computation; nothing is waited for
            but the input of the next computation
* tensor    a column linear's backward posts the gather for the weight's gradient before the input's
and where the ranks of every group launched its operations in one order, without which they would
wait for each other for ever. Of a run that has its operators marked (`telemetry.waterfall`) it can
be asked which ones run beside a transfer (`beside`); the tensor rule needs the marks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megascale.events import Event, Header, Span

COMPUTES = ("forward", "backward", "backward_input", "backward_weight", "head")
_OPERATORS = ("op_forward", "op_backward")
_POSTS = {"grad_sync": ("reduce_scatter", "all_to_all"), "param_gather": ("all_gather",)}
Runs = Mapping[int, Sequence[Event]]
"""The events of every rank."""


@dataclass(frozen=True)
class Finding:
    """An overlap that is not there, or an order that is not one. `rank` is global."""

    rule: str
    rank: int
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.rule}: {self.what}"


def findings(runs: Runs, step: int) -> list[Finding]:
    """Everything that is wrong in `step`; parameters that travel into the next one are followed."""
    found: list[Finding] = []
    for rank, events in sorted(runs.items()):
        spans = spans_of(events, step)
        found += [Finding("gradients", rank, what) for what in late_gradients(spans)]
        following = [*spans, *spans_of(events, step + 1)]
        found += [Finding("parameters", rank, what) for what in late_parameters(following, step)]
        found += [Finding("pipeline", rank, what) for what in late_transfers(spans)]
        found += [Finding("tensor", rank, what) for what in late_gathers(spans)]
    return found + orders(runs, step)


def spans_of(events: Iterable[Event], step: int) -> list[Span]:
    """Those of a step in the order of launching: who begins first, and of those the longer."""
    spans = [e for e in events if isinstance(e, Span) and e.step == step]
    return sorted(spans, key=lambda s: (s.t0_ns, -s.dur_ns))


def end_of(span: Span) -> int:
    return span.t0_ns + span.dur_ns


def travelling(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """When gradients or parameters travel between data ranks: from the begin of what posts to the
    end of what waits, ns."""
    return [(post.t0_ns, end_of(wait)) for post, wait in _between_data_ranks(spans)]


def beside(post: Span, wait: Span, spans: Iterable[Span]) -> list[Span]:
    """Operators that begin while a transfer is in flight."""
    return [s for s in spans if s.name in _OPERATORS and end_of(post) <= s.t0_ns < wait.t0_ns]


# ---------------------------------------------------------------- data ranks


def late_gradients(spans: Sequence[Span]) -> list[str]:
    """Buckets whose gradients no computation hides; the last one that is posted may be."""
    computes = [s for s in spans if s.name in COMPUTES]
    pairs = [(p, w) for p, w in _between_data_ranks(spans) if p.name == "grad_sync"]
    return [
        f"nothing is computed between posting {post.bucket} and waiting for it"
        for post, wait in pairs[:-1]
        if not any(end_of(c) > end_of(post) and c.t0_ns < wait.t0_ns for c in computes)
    ]


def late_parameters(spans: Sequence[Span], step: int) -> list[str]:
    """Buckets posted in `step` whose parameters are waited for before a forward needs them."""
    forwards = [s for s in spans if s.name in ("forward", "head")]
    found = []
    for post, wait in _between_data_ranks(spans):
        if post.name != "param_gather" or post.step != step:
            continue
        inside = any(f.t0_ns <= wait.t0_ns < end_of(f) for f in forwards)
        if not inside:
            found.append(f"{post.bucket} is waited for outside the forward that reads it")
    return found


def _between_data_ranks(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """(what posts, what waits) of each bucket's transfer, in the order of waiting. Without overlap
    transfers are posted inside the span that waits for them."""
    own = sorted((s for s in spans if s.name in _POSTS), key=lambda s: (s.t0_ns, -s.dur_ns))
    posts = [s for s in own if s.op in _POSTS[s.name]]
    found: list[tuple[Span, Span]] = []
    for wait in (s for s in own if s.op in ("wait", "finish")):
        waited = [
            post
            for post in posts
            if post.name == wait.name
            and wait.bucket in (None, post.bucket)
            and post.t0_ns < end_of(wait)
        ]
        found += [(post, wait) for post in waited]
        posts = [post for post in posts if post not in waited]
    return found


# ---------------------------------------------------------------- pipeline


def late_transfers(spans: Sequence[Span]) -> list[str]:
    """Receives and sends that are posted too late, and waits for what the next computation does not
    need. A weights' half hides no receive: with joined weight gradients most of them are empty."""
    computes = [s for s in spans if s.name in COMPUTES]
    hiding = [s for s in computes if s.name != "backward_weight"]
    found = []
    for receive in (s for s in spans if s.name == "recv"):
        position = _end_point(receive, hiding)
        if position and receive.t0_ns > hiding[position - 1].t0_ns:
            found.append(
                f"the {receive.op} of chunk {receive.chunk}, micro-batch {receive.micro_batch} is "
                "not posted before the computation ahead of the one that it feeds"
            )
    for send in (s for s in spans if s.name == "send"):
        position = _end_point(send, computes)
        behind = [] if position is None else computes[position + 1 :]
        if behind and send.t0_ns > behind[0].t0_ns:
            found.append(
                f"the {send.op} of chunk {send.chunk}, micro-batch {send.micro_batch} is not sent "
                "before the computation behind the one that makes it"
            )
    waits = [s for s in spans if s.name == "pp_wait" and s.op == "all"]
    if waits:
        found.append(f"{len(waits)} times everything posted is waited for, sends too")
    return found


def _end_point(transfer: Span, computes: Sequence[Span]) -> int | None:
    """The place of the computation that a receive feeds or that makes what is sent."""
    kind = "forward" if transfer.op == "activation" else "backward"
    for place, compute in enumerate(computes):
        same = (compute.chunk, compute.micro_batch) == (transfer.chunk, transfer.micro_batch)
        if same and compute.name in (kind, f"{kind}_input"):
            return place
    return None


# ---------------------------------------------------------------- tensor ranks


def late_gathers(spans: Sequence[Span]) -> list[str]:
    """Column linears whose backward begins the gather for the weight behind the input's GEMM."""
    posts = [s for s in spans if s.name == "tp_post"]
    gemms = [s for s in spans if s.name == "tp_gemm" and s.op == "input_gradient"]
    found = []
    for column in (s for s in spans if s.name == "tp_column_backward"):
        own = [p for p in posts if _inside(p, column)]
        first = next((g for g in gemms if _inside(g, column)), None)
        if first is not None and any(p.t0_ns > first.t0_ns for p in own):
            found.append(f"backward {column.seq} gathers for the weight's gradient too late")
    return found


def _inside(span: Span, outer: Span) -> bool:
    return outer.t0_ns <= span.t0_ns < end_of(outer)


# ---------------------------------------------------------------- order


def orders(runs: Runs, step: int) -> list[Finding]:
    """Groups whose ranks did not launch the same operations in the same order."""
    found: list[Finding] = []
    launched: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = defaultdict(dict)
    for rank, events in sorted(runs.items()):
        header = next(e for e in events if isinstance(e, Header))
        for group, operations in _launched(spans_of(events, step)).items():
            launched[group, _members(group, header)][rank] = operations
    for (group, _), by_rank in sorted(launched.items()):
        (first, expected), *others = by_rank.items()
        for rank, operations in others:
            if operations != expected:
                at = _first_difference(expected, operations)
                found.append(
                    Finding("order", rank, f"operation {at} of {group} is not rank {first}'s")
                )
    return found


def _launched(spans: Iterable[Span]) -> dict[str, list[str]]:
    """What was launched on each group or channel, in words that are equal at all its ranks."""
    found: dict[str, list[str]] = defaultdict(list)
    for span in spans:
        if span.group is None:
            continue
        if span.name in ("send", "recv"):
            # what a chunk sends arrives for the next one, its gradient for the one before
            shift = 0 if span.name == "send" else -1 if span.op == "activation" else 1
            chunk = None if span.chunk is None else span.chunk + shift
            found[span.group].append(f"chunk {chunk}, micro-batch {span.micro_batch}")
        else:
            found[span.group].append(f"{span.name} {span.op} {span.bucket}")
    return found


def _members(group: str, header: Header) -> tuple[int, ...]:
    """What ranks of one group have in common."""
    if group == "tensor":
        return header.dp_rank, header.pp_rank
    if group == "data":
        return header.tp_rank, header.pp_rank
    if group == "world":
        return ()
    if group == "vocabulary":
        return (header.dp_rank,)
    return header.tp_rank, header.dp_rank  # between stages


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(one), len(other)) if same is None else same
