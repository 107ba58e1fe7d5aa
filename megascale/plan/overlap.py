"""Seconds of work on a cluster, with tensor-parallel transfers hidden as the program hides them.

How a transfer meets a matrix product (`Software.tensor_overlap`):

| | hidden | how long both take |
|---|---|---|
| none | nothing | the sum |
| backward | what is independent of the product | side by side, each slowed by the other |
| chunked, by collectives (MegaScale Figure 3c) | also its operand or result | a pipeline |
| chunked, by copy engines (`flux/*/chunked.py`) | the same | side by side, in pieces |
| fused (Flux) | the same | side by side, and the last tile's transfer (the first's) |

Side by side, compute is slowed by sigma and a transfer by rho, while both run and no longer.
By collectives, a chunk is some rows of every rank: the first gather or the last reduction is
exposed, and the program takes the number of chunks that is fastest, one of them being one. By copy
engines, a piece is the rows of some ranks, the own ones first (last), then twice as many each time:
nothing is exposed that is shorter than the product, but for the sum of what was received. Pieces
are priced at their own size, so that small ones pay their lower rate. No form is taken that is
slower than product and transfer one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megascale.plan.case import TensorOverlap
from megascale.plan.effects.effects import NO_EFFECTS, Effects
from megascale.plan.machine.cluster import Cluster, LinkName
from megascale.plan.machine.groups import GroupShape, group_shape
from megascale.plan.prices import Spent
from megascale.plan.work.operations import (
    Attention,
    Axis,
    Collective,
    Direction,
    Gemm,
    MemoryPass,
    Operation,
    Transfer,
    Work,
)
from megascale.topology import Mesh

CHUNKS = (1, 2, 4, 8)
_Hidden = tuple[list[Collective], list[Collective]]
TILE_ROWS = 128  # of every rank's rows: what a fused kernel sends, or waits for, at a time


@dataclass(frozen=True)
class Pricer:
    """Prices of one cluster, for one placement of ranks."""

    cluster: Cluster
    mesh: Mesh
    tensor_overlap: TensorOverlap = "fused"
    effects: Effects = NO_EFFECTS
    copy_engines: bool = True

    def group(self, axis: Axis) -> GroupShape:
        return group_shape(self.mesh, axis, self.cluster.devices_per_node)

    def compute_s(self, operation: Gemm | Attention | MemoryPass) -> float:
        return self.cluster.seconds(operation) * self.effects.compute_factor

    def transfer_s(
        self, collective: Collective, *, share: float = 1.0, copy_engine: bool = False
    ) -> float:
        """Alone on its link; `share`: of the bytes."""
        return self.cluster.transfer_s(
            collective.transfer,
            share * collective.num_bytes,
            self.group(collective.axis),
            self.effects.network_share.of(collective.axis),
            copy_engine=copy_engine,
        )

    def spent(self, work: Work, joined: int = 1) -> Spent:
        """Of a piece of work, one operation after the other but for what overlaps.

        joined  micro-batches of whose weight gradients one is counted
        """
        return self.spent_of_parts((work,), joined)[0]

    def spent_of_parts(self, parts: Sequence[Work], joined: int = 1) -> list[Spent]:
        """Of consecutive parts, whose transfers may hide behind products of other parts."""
        hidden = self._hidden(parts)
        names = {c.name for both in hidden.values() for held in both for c in held}
        found = []
        for part in parts:
            spent = Spent()
            for op in part:
                if isinstance(op, Gemm):
                    share = 1.0 / joined if op.direction is Direction.WGRAD else 1.0
                    spent += self._gemm(op, *hidden[op.name]).times(share)
                elif op.name not in names:
                    spent += self._single(op)
            found.append(self._launched(spent, part))
        return found

    def _hidden(
        self, parts: Sequence[Work]
    ) -> dict[str, tuple[list[Collective], list[Collective]]]:
        """By product: the collectives that are cut with it, and those that run beside it."""
        hidden: dict[str, _Hidden] = {
            op.name: ([], []) for part in parts for op in part if isinstance(op, Gemm)
        }
        for op in (op for part in parts for op in part if isinstance(op, Collective)):
            under, beside = op.under or "", op.beside or ""
            apart = self._prefers_others and beside in hidden
            if self._cuts and under in hidden and not apart:
                hidden[under][0].append(op)
            elif self.tensor_overlap != "none" and beside in hidden:
                hidden[beside][1].append(op)
        return hidden

    @property
    def _cuts(self) -> bool:
        return self.tensor_overlap in ("chunked", "fused")

    @property
    def _prefers_others(self) -> bool:
        """A product that is independent hides a collective whole, without first or last chunk."""
        return self.tensor_overlap == "chunked" and not self.copy_engines

    def _single(self, op: Operation) -> Spent:
        if isinstance(op, Collective):
            return Spent(tensor_s=self.transfer_s(op))
        if isinstance(op, Attention):
            return Spent(attention_s=self.compute_s(op))
        assert isinstance(op, MemoryPass), op
        return Spent(memory_s=self.compute_s(op))

    def _gemm(self, gemm: Gemm, under: list[Collective], beside: list[Collective]) -> Spent:
        """A product and the transfers that hide behind it; what they add is theirs."""
        alone_s = self.compute_s(gemm)
        transfers = [*under, *beside]
        if not transfers:
            return Spent(gemm_s=alone_s)
        both_s = self._in_chunks_s(gemm, under, beside, most=1)
        local = not self.group(transfers[0].axis).crosses_nodes
        if self.tensor_overlap == "fused":
            both_s = min(both_s, self._in_tiles_s(alone_s, gemm, under, beside, local))
        elif self.tensor_overlap == "chunked" and self.copy_engines and local:
            both_s = min(both_s, self._in_pieces_s(gemm, under, beside))
        elif self.tensor_overlap == "chunked":
            both_s = min(both_s, self._in_chunks_s(gemm, under, beside))
        # samples can make a product's pieces cheaper than the whole, which no transfer would do
        return Spent(gemm_s=alone_s, tensor_s=max(0.0, both_s - alone_s))

    def _in_tiles_s(
        self,
        gemm_s: float,
        gemm: Gemm,
        under: list[Collective],
        beside: list[Collective],
        local: bool,
    ) -> float:
        """One kernel, or copies beside it."""
        group = self.group([*under, *beside][0].axis)
        tile = min(1.0, TILE_ROWS * group.ranks / gemm.rows)
        last_s = max((self.transfer_s(c, share=tile, copy_engine=local) for c in under), default=0)
        return self._beside_s(gemm_s, [*under, *beside], copy_engine=local) + last_s

    def _in_pieces_s(self, gemm: Gemm, under: list[Collective], beside: list[Collective]) -> float:
        """Copy engines: 1, 1, 2, 4, ... ranks' rows at a time; then the sum of what arrived."""
        if not under:
            return self._beside_s(self.compute_s(gemm), beside, copy_engine=True)
        ranks = self.group(under[0].axis).ranks
        own = -(-gemm.rows // ranks)
        shards, size, left = [1], 1, ranks - 1
        while left > 0:
            shards.append(min(size, left))
            size, left = 2 * size, left - size
        gemm_s = sum(self.compute_s(replace(gemm, rows=own * count)) for count in shards)
        sums = sum(c.num_bytes for c in under if c.transfer is not Transfer.ALL_GATHER)
        sum_s = self.compute_s(MemoryPass("add", sums * (ranks + 1) / ranks)) if sums else 0.0
        return self._beside_s(gemm_s, [*under, *beside], copy_engine=True) + sum_s

    def _beside_s(self, gemm_s: float, transfers: list[Collective], *, copy_engine: bool) -> float:
        """The transfers one after the other, beside a product."""
        link = self.cluster.link_of(self.group(transfers[0].axis))
        sigma, rho = self._slow_downs("copy_engine" if copy_engine else link)
        moving_s = sum(self.transfer_s(c, copy_engine=copy_engine) for c in transfers)
        return side_by_side(gemm_s, moving_s, sigma, rho)

    def _slow_downs(self, link: LinkName) -> tuple[float, float]:
        return self.cluster.slow_down(link), self.cluster.transfer_slow_down(link)

    def _in_chunks_s(
        self, gemm: Gemm, under: list[Collective], beside: list[Collective], most: int = CHUNKS[-1]
    ) -> float:
        """In the number of chunks that is fastest. `beside` runs as it is, beside all of them."""
        link = self.cluster.link_of(self.group([*under, *beside][0].axis))
        sigma, rho = self._slow_downs(link)
        besides_s = sum(self.transfer_s(c) for c in beside)
        best = float("inf")
        for count in CHUNKS:
            if count > most or (count > 1 and gemm.rows < count * TILE_ROWS):
                break
            chunk_s = self.compute_s(replace(gemm, rows=-(-gemm.rows // count)))
            moving_s = sum(self.transfer_s(c, share=1.0 / count) for c in under)
            piped_s = chunk_s + moving_s
            if count > 1:
                piped_s += (count - 1) * side_by_side(chunk_s, moving_s, sigma, rho)
            busy_s = count * moving_s  # of the link that `beside` needs too
            spare_s = max(0.0, piped_s - busy_s)
            best = min(best, busy_s + side_by_side(spare_s, besides_s, sigma, rho))
        return best

    def _launched(self, spent: Spent, part: Work) -> Spent:
        """What the device waits for the host, where launches take longer than the work."""
        host_s = self.cluster.device.launch_s * sum(_kernels(op) for op in part)
        return spent + Spent(launch_s=max(0.0, host_s - spent.total_s))


def side_by_side(compute_s: float, transfer_s: float, sigma: float, rho: float) -> float:
    """Compute and a transfer that start together; each is slowed only while both run."""
    compute_end_s, transfer_end_s = compute_s * sigma, transfer_s * rho
    if transfer_end_s <= compute_end_s:
        return transfer_end_s + compute_s - transfer_end_s / sigma
    return compute_end_s + transfer_s - compute_end_s / rho


def _kernels(op: Operation) -> int:
    if isinstance(op, MemoryPass):
        return op.kernels
    return 3 if isinstance(op, Attention) and op.backward else 1
