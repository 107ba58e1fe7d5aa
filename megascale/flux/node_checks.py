"""What a rank can say of a call over nodes by itself: that it is wrong (`hierarchical.py`).

A rank that refused after it had sent its shard would leave the equal ranks of other nodes with half
an exchange, so all of this comes first. It costs a few microseconds. What must be equal on all
ranks (`num_rows`, `chunks`, the layout) no rank can see, nor what a form is able to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megascale.errors import FluxError
from megascale.flux.call import Call, check_tensors
from megascale.flux.problem import Op, check_at, refuse_unknown_rows, whole_number

if TYPE_CHECKING:
    from megascale.flux.hierarchical import Nodes


def check_over_nodes(
    op: Op,
    x: Any,
    weights: Any,
    biases: Any,
    nodes: Nodes,
    form: Any,
    layout: Any,
    num_rows: int | None = None,
    **flags: Any,
) -> int:
    """The rows of all ranks; FluxError where an argument is wrong. `flags` are True or False."""
    if not callable(form):
        raise FluxError(f"form is of type {type(form).__name__}; it must be a form of one node")
    for name, values in (("weights", weights), ("biases", biases)):
        if not isinstance(values, Sequence):
            raise FluxError(
                f"{name} is of type {type(values).__name__}; it must be a list, one each"
            )
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise FluxError(f"{name} is {flag!r}; legal are True and False")
    check_tensors(Call(op, x, weights, biases, layout))
    place = (nodes.world_size, nodes.node * nodes.local.world_size + nodes.local.rank)
    m = check_at(op, x, weights, biases, place, layout, num_rows).m
    if op == "ag_gemm" and num_rows is None:
        refuse_unknown_rows(m)
    if x.device.type != nodes.local.device.type:
        raise FluxError(
            f"x is on {x.device} and the ranks of a node meet on {nodes.local.device}; put x there"
        )
    return m


def check_cut(group: Any, ranks_per_node: Any, ranks_of: Any) -> int:
    """ranks_per_node; FluxError where `group` cannot be cut into full nodes."""
    if not isinstance(group, dist.ProcessGroup):
        raise FluxError(
            f"group is of type {type(group).__name__}; it must be a process group that this "
            "process is a member of"
        )
    ranks_per_node = whole_number("ranks_per_node", ranks_per_node, 1)
    if group.size() % ranks_per_node:
        raise FluxError(
            f"ranks_per_node is {ranks_per_node} and the group has {group.size()} ranks; every "
            "node must hold equally many"
        )
    if not callable(ranks_of):
        raise FluxError(
            f"ranks_of is of type {type(ranks_of).__name__}; it must be a function of the node's "
            "group, such as `lambda group: Arena.of(group, device)`"
        )
    return ranks_per_node
