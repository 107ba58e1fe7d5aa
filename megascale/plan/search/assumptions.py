"""What a plan rests on, in words: program, margins, where the cluster's numbers come from."""

from __future__ import annotations

from megascale.plan.case import Layout
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.groups import group_shape
from megascale.plan.machine.usable import reserve
from megascale.plan.search.question import Question
from megascale.plan.search.scale import Scale

_FORMS = {
    "none": "nothing of it hides",
    "backward": "hidden where it is independent of the product beside it",
    "chunked": "hidden in chunks of its products",
    "fused": "fused into its products",
}


def assumptions_of(
    question: Question, cluster: Cluster, layout: Layout, scale: Scale
) -> tuple[str, ...]:
    """Lines, the ones that matter most first."""
    device = cluster.device
    software = question.software_of(layout)
    lines = [
        scale.told(question.case(layout), cluster),
        (
            f"memory: {reserve(device):.0%} of {device.memory_gb:g} GiB is kept "
            "free for what is not predicted (fragmentation, CUDA's context, NCCL's buffers)"
        ),
        f"matrix products: {device.gemm.source_of('share')}",
        f"links in a node: {cluster.nvlink.source_of('all_gather')}",
    ]
    crosses = cluster.num_devices > cluster.devices_per_node
    if crosses and cluster.network is not None:
        lines.append(f"network between nodes: {cluster.network.source_of('all_gather')}")
    if layout.tensor > 1:
        group = group_shape(layout.mesh, "tensor", cluster.devices_per_node)
        place = "across nodes" if group.crosses_nodes else "inside a node"
        lines.append(f"tensor-parallel communication {place}, {_FORMS[software.tensor_overlap]}")
    if question.job.model.attention_window is None:
        lines.append("MFU counts attention in full; `causal` counts half of it")
    else:
        lines.append("MFU counts attention in full within the window; `causal` counts half of it")
    if question.job.dtype_bytes > 2:
        lines.append(f"computing in {8 * question.job.dtype_bytes} bits (training.dtype)")
    if question.config.cluster.topology:
        lines.append(
            "cluster.topology is not counted here: ranks fill nodes in order, and `train` and "
            "`run` place them by that file (docs/cluster-effects.md says what it gains)"
        )
    if cluster.notes:
        lines.append(f"cluster {cluster.name!r}: {cluster.notes}")
    return tuple(lines)
