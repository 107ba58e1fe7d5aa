"""Seconds of work on a cluster, with tensor-parallel transfers hidden as the program hides them.

How a transfer meets a matrix product (`Software.tensor_overlap`):

| | hidden | how long both take |
|---|---|---|
| none | nothing | the sum |
| backward | what is independent of the product | side by side, each slowed by the other |
| chunked (MegaScale Figure 3c) | its own operand or result too | chunks: a pipeline of two stages |
| fused (Flux) | the same | side by side, and the last tile's transfer (the first's) |

Side by side, compute is slowed by sigma and a transfer by rho, while both run and no longer. In a
node, chunks and tiles travel by copy engines, as the paper's "Copy A0" and `flux/` do, and what is
reduced is summed by a pass of its own; whole collectives are NCCL's. Chunks are priced at their own
size, so that many small ones pay their products' lower rate and each transfer's latency; the
program takes the number of chunks that is fastest, one of them being one, as its tuner does. That
number is the same for product and transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megascale.plan.case import TensorOverlap
from megascale.plan.effects.effects import NO_EFFECTS, Effects
from megascale.plan.machine.cluster import Cluster
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
TILE_ROWS = 128  # of every rank's rows: what a fused kernel sends, or waits for, at a time


@dataclass(frozen=True)
class Pricer:
    """Prices of one cluster, for one placement of ranks."""

    cluster: Cluster
    mesh: Mesh
    tensor_overlap: TensorOverlap = "fused"
    effects: Effects = NO_EFFECTS

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
        gemms = {op.name: op for part in parts for op in part if isinstance(op, Gemm)}
        under: dict[str, list[Collective]] = {}
        beside: dict[str, list[Collective]] = {}
        alone: set[str] = set()
        for part in parts:
            for op in part:
                if not isinstance(op, Collective):
                    continue
                if self._cuts and op.under in gemms:
                    under.setdefault(op.under or "", []).append(op)
                elif self.tensor_overlap != "none" and op.beside in gemms:
                    beside.setdefault(op.beside or "", []).append(op)
                else:
                    alone.add(op.name)
        found = []
        for part in parts:
            spent = Spent()
            for op in part:
                if isinstance(op, Gemm):
                    share = 1.0 / joined if op.direction is Direction.WGRAD else 1.0
                    hides = under.get(op.name, []), beside.get(op.name, [])
                    spent += self._gemm(op, *hides).times(share)
                elif not isinstance(op, Collective) or op.name in alone:
                    spent += self._single(op)
            found.append(self._launched(spent, part))
        return found

    @property
    def _cuts(self) -> bool:
        return self.tensor_overlap in ("chunked", "fused")

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
        if not under and not beside:
            return Spent(gemm_s=alone_s)
        if self.tensor_overlap == "fused":
            both_s = self._fused_s(alone_s, gemm, under, beside)
        else:
            both_s = self._chunked_s(gemm, under, beside, CHUNKS[-1] if self._cuts else 1)
        return Spent(gemm_s=alone_s, tensor_s=both_s - alone_s)

    def _fused_s(
        self, gemm_s: float, gemm: Gemm, under: list[Collective], beside: list[Collective]
    ) -> float:
        """In tiles: one kernel, or copies beside it; where that is slower, one after the other."""
        transfers = [*under, *beside]
        local = not self.group(transfers[0].axis).crosses_nodes
        moving_s = sum(self.transfer_s(c, copy_engine=local) for c in transfers)
        sigma, rho = self._slow_downs(transfers[0], copies=local)
        tile = min(1.0, TILE_ROWS * self.group(transfers[0].axis).ranks / gemm.rows)
        last_s = max((self.transfer_s(c, share=tile, copy_engine=local) for c in under), default=0)
        tiled_s = side_by_side(gemm_s, moving_s, sigma, rho) + last_s + self._sums_s(under, local)
        return min(tiled_s, self._chunked_s(gemm, under, beside, 1))

    def _chunked_s(
        self, gemm: Gemm, under: list[Collective], beside: list[Collective], most: int
    ) -> float:
        """In the number of chunks that is fastest, at most `most`. `beside` runs as it is, beside
        all of them."""
        local = not self.group([*under, *beside][0].axis).crosses_nodes
        best = float("inf")
        for count in CHUNKS:
            if count > most or (count > 1 and gemm.rows < count * TILE_ROWS):
                break
            copies = local and count > 1
            sigma, rho = self._slow_downs([*under, *beside][0], copies=copies)
            chunk_s = self.compute_s(replace(gemm, rows=-(-gemm.rows // count)))
            moving_s = sum(self.transfer_s(c, share=1.0 / count, copy_engine=copies) for c in under)
            besides_s = sum(self.transfer_s(c, copy_engine=copies) for c in beside)
            piped_s = chunk_s + moving_s + self._sums_s(under, copies)
            if count > 1:
                piped_s += (count - 1) * side_by_side(chunk_s, moving_s, sigma, rho)
            busy_s = count * moving_s  # of the link that `beside` needs too
            spare_s = max(0.0, piped_s - busy_s)
            best = min(best, busy_s + side_by_side(spare_s, besides_s, sigma, rho))
        return best

    def _slow_downs(self, collective: Collective, *, copies: bool) -> tuple[float, float]:
        """Of compute beside the transfer, and of the transfer."""
        link = "copy_engine" if copies else self.cluster.link_of(self.group(collective.axis))
        return self.cluster.slow_down(link), self.cluster.transfer_slow_down(link)

    def _sums_s(self, transfers: list[Collective], copies: bool) -> float:
        """What copies bring of every rank is summed by a pass of its own."""
        if not copies:
            return 0.0
        return sum(
            self.compute_s(MemoryPass("sum", c.num_bytes * (1.0 + 1.0 / self.group(c.axis).ranks)))
            for c in transfers
            if c.transfer is not Transfer.ALL_GATHER
        )

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
