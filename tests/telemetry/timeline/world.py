"""Events of a small pipeline with data ranks, as the trainer records them, on clocks of one's own.

Every stage forwards each micro-batch, then runs backward; gradients are reduced over data ranks by
a span that posts and one that waits. Times are what a simulation gives: a computation begins when
its input is there, a wait ends with the last member's post.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megascale.events import Event, Header, Span, run_header
from megascale.topology import Mesh

STEP = 10


@dataclass
class World:
    """mesh, and what is done; `compute_ns` of one micro-batch, `latency_ns` of every transfer."""

    mesh: Mesh = field(default_factory=lambda: Mesh(tensor=1, data=2, pipeline=3))
    micro_batches: int = 3
    compute_ns: int = 10_000
    latency_ns: int = 700
    begin_ns: Mapping[int, int] = field(default_factory=dict)  # of ranks that come late

    def events(
        self,
        *,
        clock_ns: Mapping[str, int] | None = None,
        hosts: Mapping[int, str] | None = None,
        noise: Any = None,
    ) -> list[Event]:
        """clock_ns  by how much a host's clock is ahead; noise  called for the error of a time"""
        host = {r: (hosts or {}).get(r, f"host{r:02d}") for r in range(self.mesh.world_size)}
        spans = self._run()
        events: list[Event] = []
        for rank in range(self.mesh.world_size):
            ahead = (clock_ns or {}).get(host[rank], 0)
            events.append(_header(self.mesh, rank, host[rank]))
            for span in spans[rank]:
                error = 0 if noise is None else int(noise())
                end = 0 if noise is None else int(noise())
                t0 = span.t0_ns + ahead + error
                dur = max(0, span.dur_ns + end - error)
                events.append(replace(span, t0_ns=t0, dur_ns=dur))
        return events

    def _run(self) -> dict[int, list[Span]]:
        spans: dict[int, list[Span]] = {rank: [] for rank in range(self.mesh.world_size)}
        now = {rank: 1_000_000 + self.begin_ns.get(rank, 0) for rank in spans}
        for ranks in self.mesh.groups("pipeline"):
            self._pass(spans, now, ranks, "forward", "activation", 1)
            self._pass(spans, now, ranks[::-1], "backward", "gradient", -1)
        for ranks in self.mesh.groups("data"):
            posts = {rank: now[rank] for rank in ranks}
            done = max(posts.values()) + self.latency_ns
            for rank in ranks:
                fields: dict[str, Any] = {"name": "grad_sync", "bucket": "chunk0"}
                post = {"op": "reduce_scatter", "group": "data", "seq": STEP, "stream": "data"}
                spans[rank].append(_span(rank, posts[rank], 50, **fields, **post))
                spans[rank].append(
                    _span(rank, posts[rank] + 60, done - posts[rank] - 60, **fields, op="wait")
                )
        return spans

    def _pass(
        self,
        spans: dict[int, list[Span]],
        now: dict[int, int],
        ranks: list[int],
        name: str,
        payload: str,
        shift: int,
    ) -> None:
        """Every micro-batch through `ranks`, in order of the data's way; the stage is the chunk."""
        arrived: dict[tuple[int, int], int] = {}
        for place, rank in enumerate(ranks):
            stage = self.mesh.coordinates(rank).pp_rank
            for m in range(self.micro_batches):
                seq = STEP * self.micro_batches + m + 1
                of = {"chunk": stage, "micro_batch": m}
                move: dict[str, Any] = {"op": payload, "stream": "pipeline", "seq": seq, **of}
                if place:
                    group = f"{stage - shift}->{stage} {payload}"
                    spans[rank].append(_span(rank, now[rank], 20, name="recv", group=group, **move))
                    wait = max(now[rank] + 30, arrived[place, m])
                    op = "RA" if shift == 1 else "RG"
                    begin = now[rank] + 30
                    spans[rank].append(
                        _span(rank, begin, wait - begin, name="pp_wait", op=op, **of)
                    )
                    now[rank] = wait
                spans[rank].append(_span(rank, now[rank], self.compute_ns, name=name, **of))
                now[rank] += self.compute_ns
                if place + 1 < len(ranks):
                    group = f"{stage}->{stage + shift} {payload}"
                    spans[rank].append(_span(rank, now[rank], 25, name="send", group=group, **move))
                    arrived[place + 1, m] = now[rank] + self.latency_ns
                    now[rank] += 40


def _span(rank: int, t0_ns: int, dur_ns: int, **fields: Any) -> Span:
    return Span(rank=rank, t0_ns=t0_ns, dur_ns=dur_ns, clock="host", step=STEP, **fields)


def _header(mesh: Mesh, rank: int, host: str) -> Header:
    return replace(run_header(mesh, rank, host=host), unix_ns=10**18, monotonic_ns=0)
