"""What collectives and transfers achieve: bytes over the time in which they could move.

A collective moves when its last member has launched it and is over when the first member is done
waiting: what ranks wait for each other before is not the network's. Spans of one rank say when it
launched and when it was done; those of equal (group, seq) meet. An operation that is posted and
waited for later counts from post to the end of the wait; a wait of nothing means that it was hidden
and ended before, which is left out, because nobody knows when.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megascale.events import Span
from megascale.topology import Mesh

WAITING_OPS = ("wait", "finish")
HIDDEN_NS = 50_000  # a wait so short: the transfer was over already
SLOW = 1.5  # times the lower quartile of the like: one slow host may slow half of all groups
FEWEST = 3  # groups that can be compared


@dataclass(frozen=True)
class Part:
    """One rank's part in an operation.

    kind      (name, op, group) as in its span: "grad_sync", "reduce_scatter", "data"
    instance  which of the groups of that name: parallel coordinates that its ranks share
    end_ns    None: it was hidden, or is the sending end
    """

    rank: int
    kind: tuple[str, str, str]
    instance: tuple[int, ...]
    seq: int
    launch_ns: int
    end_ns: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class Rate:
    """All operations of one kind.

    time_s, bytes_per_s  medians; None where no bytes were recorded
    slow                 (instance, its time over the lower quartile), the slowest first
    ranks                of each slow instance
    """

    kind: tuple[str, str, str]
    number: int
    num_bytes: int | None
    time_s: float
    bytes_per_s: float | None
    slow: tuple[tuple[tuple[int, ...], float], ...]
    ranks: Mapping[tuple[int, ...], tuple[int, ...]]


def instance_of(group: str, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """What the ranks of one group of that name have in common."""
    at = mesh.coordinates(rank)
    if group == "tensor":
        return at.dp_rank, at.pp_rank
    if group == "data":
        return at.tp_rank, at.pp_rank
    if group == "world":
        return ()
    if group == "vocabulary":
        return (at.dp_rank,)
    return at.tp_rank, at.dp_rank  # between stages


def parts_of(spans: Sequence[Span], mesh: Mesh) -> list[Part]:
    """The operations of one rank's spans, in order of time."""
    posts = [s for s in spans if s.group is not None and s.seq is not None]
    waits = _Waits(spans)
    found = []
    for post in posts:
        end_ns: int | None = post.t0_ns + post.dur_ns
        if post.name == "send":
            end_ns = None
        elif post.name == "recv" or post.name in waits.names:
            wait = waits.of(post)
            if wait is None:
                continue
            end_ns = wait.t0_ns + wait.dur_ns if wait.dur_ns > HIDDEN_NS else None
        group = post.group or ""
        name = "transfer" if post.name in ("send", "recv") else post.name
        kind = (name, post.op or "", group)
        instance = instance_of(group, mesh, post.rank)
        launch_ns = post.t0_ns
        found.append(
            Part(post.rank, kind, instance, post.seq or 0, launch_ns, end_ns, post.num_bytes)
        )
    return found


class _Waits:
    """The waits of one rank, in order of time, by what they can be for."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._of_bucket: dict[tuple[str, str | None], list[Span]] = defaultdict(list)
        self._of_receive: dict[tuple[int | None, ...], Span] = {}
        for span in spans:
            if span.group is not None:
                continue
            if span.name == "pp_wait":
                # the activation of a micro-batch and its gradient, told apart by who waits
                key = span.step, span.chunk, span.micro_batch, int(span.op == "RG")
                self._of_receive.setdefault(key, span)
            elif span.op in WAITING_OPS:
                self._of_bucket[span.name, span.bucket].append(span)
        self.names = {name for name, _ in self._of_bucket}

    def of(self, post: Span) -> Span | None:
        """The first wait behind `post` that is for it, of its own step or the next."""
        if post.name == "recv":
            key = post.step, post.chunk, post.micro_batch, int(post.op == "gradient")
            return self._of_receive.get(key)
        found = None
        for bucket in {post.bucket, None}:
            waits = self._of_bucket.get((post.name, bucket), ())
            place = bisect_left(waits, post.t0_ns, key=lambda span: span.t0_ns)
            if place < len(waits) and (found is None or waits[place].t0_ns < found.t0_ns):
                found = waits[place]
        return None if found is None or (found.step or 0) > (post.step or 0) + 1 else found


def rates(parts: Iterable[Part], sizes: Mapping[str, int] | None = None) -> list[Rate]:
    """What each kind of operation achieves, by name; operations with one known end only.

    sizes  ranks of a group by name: where not all of them are among `parts`, the last to launch may
           be one of the others, so such operations are left out
    """
    sizes = sizes or {}
    meetings: dict[tuple[tuple[str, str, str], tuple[int, ...], int], list[Part]] = defaultdict(
        list
    )
    for part in parts:
        meetings[part.kind, part.instance, part.seq].append(part)
    by_kind: dict[tuple[str, str, str], list[tuple[tuple[int, ...], float, int | None]]] = (
        defaultdict(list)
    )
    ranks: dict[tuple[tuple[str, str, str], tuple[int, ...]], set[int]] = defaultdict(set)
    for (kind, instance, _), members in meetings.items():
        ends = [part.end_ns for part in members if part.end_ns is not None]
        if len(members) < max(2, sizes.get(kind[2], 2)) or not ends:
            continue
        time_s = (min(ends) - max(part.launch_ns for part in members)) / 1e9
        if time_s <= 0:
            continue  # over before the last one says that it launched: clocks disagree
        moved = [part.num_bytes for part in members if part.num_bytes]
        by_kind[kind].append((instance, time_s, max(moved, default=None)))
        ranks[kind, instance].update(part.rank for part in members)
    return [_rate(kind, of, ranks) for kind, of in sorted(by_kind.items())]


def _rate(
    kind: tuple[str, str, str],
    operations: Sequence[tuple[tuple[int, ...], float, int | None]],
    ranks: Mapping[tuple[tuple[str, str, str], tuple[int, ...]], set[int]],
) -> Rate:
    by_instance: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for instance, time_s, _ in operations:
        by_instance[instance].append(time_s)
    medians = {instance: statistics.median(times) for instance, times in by_instance.items()}
    usual_s = sorted(medians.values())[len(medians) // 4]
    slow = sorted(
        (
            (instance, time_s / usual_s)
            for instance, time_s in medians.items()
            if len(medians) >= FEWEST and time_s > SLOW * usual_s
        ),
        key=lambda one: -one[1],
    )
    sized = [(time_s, size) for _, time_s, size in operations if size]
    return Rate(
        kind=kind,
        number=len(operations),
        num_bytes=max((size for _, size in sized), default=None),
        time_s=statistics.median(time_s for _, time_s, _ in operations),
        bytes_per_s=statistics.median(size / t for t, size in sized) if sized else None,
        slow=tuple(slow),
        ranks={instance: tuple(sorted(ranks[kind, instance])) for instance, _ in slow},
    )
