"""Whether the GPUs of a group can run the operators over symmetric memory, and if not, why not.

Every rank describes itself once (`describe`), the group exchanges the descriptions, and one pure
function of all of them gives the verdict (`obstacle`). So all ranks say the same: a rank that
decided by what it alone sees would take another form than its peers, and they would wait for ever.

Cost: one exchange of some 100 bytes a rank, at the group's first use; it may not fall into a CUDA
graph capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist

from megascale.env import hostname, multicast_is_off

# Where the kernels were tried; others may lack an instruction, or the shared memory they need.
KNOWN_CAPABILITIES = ((8, 0), (9, 0))


@dataclass(frozen=True)
class RankFacts:
    """One rank, as it sees itself.

    uuid         of its GPU
    reachable    uuids of the GPUs, visible to it, whose memory its GPU can address
    """

    device_type: str
    host: str = ""
    name: str = ""
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)
    reachable: frozenset[str] = frozenset()
    has_triton: bool = True
    multicast_off: bool = True


def describe(device: torch.device) -> RankFacts:
    """The facts of this process and its device."""
    if device.type != "cuda":
        return RankFacts(device.type, host=hostname(), has_triton=_has_triton())
    own = device.index
    properties = torch.cuda.get_device_properties(own)
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    return RankFacts(
        device.type,
        host=hostname(),
        name=properties.name,
        uuid=str(properties.uuid),
        capability=(properties.major, properties.minor),
        reachable=frozenset(
            str(torch.cuda.get_device_properties(i).uuid)
            for i in others
            if torch.cuda.can_device_access_peer(own, i)
        ),
        has_triton=_has_triton(),
        multicast_off=multicast_is_off(),
    )


def obstacle(ranks: Sequence[RankFacts]) -> str | None:
    """Why ranks with these facts cannot run the fused forms; None where they can."""
    return _alone(ranks) or _together(ranks)


def _alone(ranks: Sequence[RankFacts]) -> str | None:
    """What keeps one rank from it."""
    for rank, facts in enumerate(ranks):
        if facts.device_type != "cuda":
            return f"rank {rank} computes on {facts.device_type}; the kernels need CUDA devices"
        if not facts.has_triton:
            return (
                f"rank {rank} cannot import triton, in which the kernels are written; install it "
                "with: pip install 'megascale[gpu]'"
            )
        if facts.capability not in KNOWN_CAPABILITIES:
            known = ", ".join(_dotted(capability) for capability in KNOWN_CAPABILITIES)
            return (
                f"rank {rank} has {facts.name} of compute capability {_dotted(facts.capability)}; "
                f"the kernels were tried on {known}"
            )
        if not facts.multicast_off:
            return (
                f"NVLink multicast is not switched off on rank {rank}; call "
                "megascale.env.switch_multicast_off() before the first use of CUDA"
            )
    return None


def _together(ranks: Sequence[RankFacts]) -> str | None:
    """What keeps them from each other."""
    owners: dict[str, int] = {}
    for rank, facts in enumerate(ranks):
        if facts.host != ranks[0].host:
            return (
                f"rank 0 is on {ranks[0].host} and rank {rank} on {facts.host}; symmetric memory "
                "reaches the GPUs of one host"
            )
        if facts.uuid in owners:
            return f"ranks {owners[facts.uuid]} and {rank} share a GPU; give each rank its own"
        owners[facts.uuid] = rank
        if facts.capability != ranks[0].capability:
            return (
                f"rank 0 has {ranks[0].name} and rank {rank} has {facts.name}; the ranks of a "
                "group need GPUs of one kind"
            )
    for rank, facts in enumerate(ranks):
        for uuid, peer in owners.items():
            if peer != rank and uuid not in facts.reachable:
                return (
                    f"the GPU of rank {rank} has no peer access to the GPU of rank {peer}, or does "
                    "not see it (CUDA_VISIBLE_DEVICES)"
                )
    return None


_verdicts: dict[str, tuple[dist.ProcessGroup, str | None]] = {}


def why_not_fused(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why this group cannot run the fused forms on its devices; None where it can.

    Collective over the group at its first call, then remembered. All ranks get the same answer.
    """
    if device.type != "cuda":  # nothing to exchange: this rank cannot, whatever its peers have
        return f"this rank computes on {device}; the kernels need CUDA devices"
    found = _verdicts.get(group.group_name)
    if found is None or found[0] is not group:
        ranks: list[RankFacts] = [RankFacts("")] * group.size()
        dist.all_gather_object(ranks, describe(device), group=group)
        found = _verdicts[group.group_name] = (group, obstacle(ranks))
    return found[1]


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
