"""Tensor-parallel operators of a group that spans nodes: fused inside, NCCL between (Flux).

Symmetric memory ends at the node. So a rank exchanges with the *equal* ranks of the other nodes
(same place inside the node) over the network, and each node runs the operator of one node on what
came, an exchange a time: any form of `forms.py` or other callable with its signature. A rank sends
one shard to each other node, the least there is.

**All-gather + GEMM.** The own shard goes to the equal ranks of node - 1, node - 2, ... at once and
without waiting; the node's own rows are multiplied meanwhile, then those of node + 1, node + 2, ...
in the order in which they arrive.
**GEMM + reduce-scatter**, mirrored: rows of node + 1, node + 2, ... are multiplied and summed in
this node; each sum is sent to the equal rank there while the next is computed; the own rows come
last. What the nodes sent is added in node order in fp32, with the bias: repeatable bit by bit.

`chunks` cuts an exchange further, so that with few nodes its first part is used early: the rows of
every shard (AG), or the columns of the weight (RS; by rows, x would have to be collected from all
shards). A chunk of rows is not contiguous in the output, which costs a copy of it.

**No deadlock.** A form may spin on all SMs until its local peers have sent, and NCCL needs SMs. In
AG a rank waits for its exchange i, sending *and* receiving, before it starts form i. So while it
spins in form i it owes nobody an exchange up to i; and what it waits for, form i of local peers,
needs exchanges up to i alone: by induction all complete. In RS no form waits for an exchange. To
run *beside* a form NCCL needs SMs that the form leaves free (`Arena.reserved_sms`).

Rows: rank r of the whole group is rank r % L of node r // L; shards as everywhere (c = ceil(m / W),
the last fewer or none). Inside a node every shard counts as full: what is added is cut off again.

Cost a rank and call: (nodes - 1) c K (AG) or (nodes - 1) c N (RS) elements over the network each
way, and for RS a sum of [c, N] from every node.

Legend: W ranks, L of a node, T rows of all ranks (m), t rows of this rank, c of a full shard, K
reduction, N columns of a weight, B columns or b rows of a chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.lanes import block_length, block_of, num_blocks
from megascale.flux.node_checks import check_cut, check_over_nodes
from megascale.flux.problem import Layout, whole_number
from megascale.flux.ranks import Ranks, padded
from megascale.flux.tiles import rows_per_rank, shard_rows

Form = Callable[..., Any]


@dataclass(frozen=True)
class Nodes:
    """This rank's place in a tensor group over nodes.

    local   the ranks of this node: what the form inside a node takes (an arena)
    across  the equal ranks of all nodes, in node order
    """

    local: Ranks
    across: dist.ProcessGroup

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        ranks_per_node: int,
        ranks_of: Callable[[dist.ProcessGroup], Ranks],
    ) -> Nodes:
        """Cut `group`, whose ranks are in node order. Collective over it.

        ranks_of  of the node's group, e.g. `lambda g: Arena.of(g, device)`
        Raises FluxError where nodes would not be full.
        """
        ranks_per_node = check_cut(group, ranks_per_node, ranks_of)
        members = dist.get_process_group_ranks(group)
        node, place = divmod(dist.get_rank(group), ranks_per_node)
        inside = members[node * ranks_per_node : (node + 1) * ranks_per_node]
        groups = [
            dist.new_group(ranks, use_local_synchronization=True)
            for ranks in (inside, members[place::ranks_per_node])
        ]
        return cls(ranks_of(groups[0]), groups[1])

    @property
    def node(self) -> int:
        return self.across.rank()

    @property
    def num_nodes(self) -> int:
        return self.across.size()

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.local.world_size

    def rows_of(self, num_rows: int, node: int, place: int) -> int:
        """Rows of a rank."""
        first, end = shard_rows(num_rows, self.world_size, node * self.local.world_size + place)
        return end - first


class _Exchange:
    """One tensor to the equal rank of a node and one from that of another, running."""

    def __init__(self, nodes: Nodes, sent: Tensor, to: int, received: Tensor, source: int) -> None:
        self._sent = sent  # alive until it has been read
        operations = [
            dist.P2POp(operation, tensor, group=nodes.across, group_peer=peer)
            for operation, tensor, peer in (
                (dist.isend, sent, to),
                (dist.irecv, received, source),
            )
            if tensor.numel()  # both sides know who has no rows
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Both are complete; on CUDA for what the current stream does next."""
        for work in self._works:
            work.wait()


@torch.no_grad()
def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    nodes: Nodes,
    form: Form,
    *,
    layout: Layout,
    num_rows: int | None = None,
    gathered: bool = False,
    chunks: int = 1,
    form_writes: bool = False,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_TN of each weight], x_TK where `gathered`).

    form         `all_gather_gemm` of one node
    num_rows     m, where not every rank owns equally many rows
    chunks       parts of an exchange, 1 or more
    form_writes  the form takes `outputs=` and needs no copy afterwards (the chunked one does)
    Raises FluxError for what this rank sees to be wrong, before it sends anything.
    """
    num_rows = check_over_nodes(
        *("ag_gemm", x_tK, weights, biases, nodes, form, layout, num_rows),
        gathered=gathered,
        form_writes=form_writes,
    )
    chunks = whole_number("chunks", chunks, 1)
    c, num_columns = rows_per_rank(num_rows, nodes.world_size), x_tK.shape[1]
    block = block_length(c, chunks)
    parts = [block_of(0, c, block, i) for i in range(num_blocks(c, block))]
    arrived_cK = x_tK.new_empty(nodes.num_nodes, c, num_columns)
    running = list(_send_shard(x_tK, arrived_cK, num_rows, nodes, parts))
    own_cK = padded(x_tK, c)
    axis = 0 if layout == "NK" else 1
    widths = [w.shape[axis] for w in weights] + ([num_columns] if gathered else [])
    results = [x_tK.new_empty(nodes.world_size * c, width) for width in widths]
    node_rows = nodes.local.world_size * c
    for step, (first, end) in itertools.product(range(nodes.num_nodes), parts):
        node = (nodes.node + step) % nodes.num_nodes
        if step:
            running.pop(0).wait()
        if first >= nodes.rows_of(num_rows, node, 0):
            continue  # no rank of that node has rows there
        there = [y[node * node_rows : (node + 1) * node_rows] for y in results]
        directly = form_writes and end - first == c
        into = {"outputs": there[: len(weights)]} if directly else {}
        x_bK = (arrived_cK[node] if step else own_cK)[first:end]
        products, x_BK = form(
            x_bK,
            weights,
            biases,
            nodes.local,
            layout=layout,
            num_rows=None,
            gathered=gathered,
            **into,
        )
        if not directly:
            _place(products, there[: len(weights)], nodes.local.world_size, first, end)
        if gathered:
            _place([x_BK], there[-1:], nodes.local.world_size, first, end)
    whole = [result[:num_rows] for result in results]
    return whole[: len(weights)], whole[-1] if gathered else None


def _place(
    parts: Sequence[Tensor], there: Sequence[Tensor], num_ranks: int, first: int, end: int
) -> None:
    """Rows [first, end) of every shard of a node, side by side in `parts`, to their places."""
    for part, result in zip(parts, there, strict=True):
        shards = result.view(num_ranks, -1, result.shape[1])
        shards[:, first:end].copy_(part.view(num_ranks, end - first, -1))


def _send_shard(
    x_tK: Tensor,
    arrived_cK: Tensor,
    num_rows: int,
    nodes: Nodes,
    parts: Sequence[tuple[int, int]],
) -> Iterator[_Exchange]:
    """The own shard to every other node, theirs into `arrived_cK` of each node, part by part."""
    place = nodes.local.rank
    for step in range(1, nodes.num_nodes):
        to, source = ((nodes.node + sign * step) % nodes.num_nodes for sign in (-1, 1))
        available = nodes.rows_of(num_rows, source, place)
        for first, end in parts:
            sent = x_tK[first : min(end, x_tK.shape[0])].contiguous()
            received = arrived_cK[source, first : max(first, min(end, available))]
            yield _Exchange(nodes, sent, to, received, source)


@torch.no_grad()
def gemm_reduce_scatter(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    nodes: Nodes,
    form: Form,
    *,
    layout: Layout,
    chunks: int = 1,
) -> Tensor:
    """y_tN: this rank's rows of the product summed over all ranks of all nodes, plus the bias once.

    form    `gemm_reduce_scatter` of one node
    chunks  blocks of columns, 1 or more. With a weight "KN" they are not contiguous, which cuBLAS
            takes and kernels with descriptors refuse
    Raises FluxError for what this rank sees to be wrong, before it sends anything.
    """
    num_rows = check_over_nodes("gemm_rs", x_TK, [weight], [bias_N], nodes, form, layout)
    chunks, axis = whole_number("chunks", chunks, 1), 0 if layout == "NK" else 1
    c, num_columns = rows_per_rank(num_rows, nodes.world_size), weight.shape[axis]
    own = nodes.rows_of(num_rows, nodes.node, nodes.local.rank)
    y_tN = x_TK.new_empty(own, num_columns)
    length = block_length(num_columns, chunks)
    columns = [block_of(0, num_columns, length, i) for i in range(num_blocks(num_columns, length))]
    arrived = [x_TK.new_empty(nodes.num_nodes, own, end - first) for first, end in columns]
    running: list[list[_Exchange]] = [[] for _ in columns]
    for step in range(1, nodes.num_nodes + 1):
        node, source = ((nodes.node + sign * step) % nodes.num_nodes for sign in (1, -1))
        x_LK = _rows_of_node(x_TK, node, c * nodes.local.world_size)
        for chunk, (first, end) in enumerate(columns):
            weight_B = weight.narrow(axis, first, end - first)
            part_cB = x_TK.new_empty(0, end - first)
            if x_LK is not None:
                part_cB = form(x_LK, weight_B, None, nodes.local, layout=layout)
            part_tB = part_cB[: nodes.rows_of(num_rows, node, nodes.local.rank)]
            if node != nodes.node:
                received = arrived[chunk][source]
                running[chunk].append(_Exchange(nodes, part_tB, node, received, source))
                continue
            for exchange in running[chunk]:
                exchange.wait()
            bias_B = None if bias_N is None else bias_N[first:end]
            _sum_in_order(y_tN[:, first:end], arrived[chunk], part_tB, node, bias_B)
    return y_tN


def _rows_of_node(x_TK: Tensor, node: int, rows: int) -> Tensor | None:
    """The rows of x that a node owns, as if it had `rows`; None where it has none at all."""
    x_LK = x_TK[node * rows : (node + 1) * rows]
    return padded(x_LK, rows) if x_LK.shape[0] else None


def _sum_in_order(
    out_tB: Tensor, parts_tB: Tensor, own_tB: Tensor, node: int, bias_B: Tensor | None
) -> None:
    """out = the parts of all nodes [nodes, t, B] in node order in fp32, the own one beside them."""
    if out_tB.device.type == "cuda":
        from megascale.flux.symmetric.launch import sum_parts

        sum_parts(out_tB, parts_tB, own=own_tB, rank=node, bias=bias_B)
        return
    total = torch.zeros_like(own_tB, dtype=torch.promote_types(out_tB.dtype, torch.float32))
    for source, part_tB in enumerate(parts_tB):
        total += own_tB if source == node else part_tB
    if bias_B is not None:
        total += bias_B
    out_tB.copy_(total)
