"""The ongoing events of a planted hang: what each rank of `planted.py` records at its deadline.

A rank that a fault stopped records nothing, in whatever way it was stopped: its thread does not
run, or it stands in no collective. One that left something out waits like the others, and records.
"""

from __future__ import annotations

import random
from dataclasses import replace

from megascale.events import Ongoing
from megascale.telemetry.deadline import peers
from megascale.topology import Mesh
from tests.telemetry.diagnose.planted import SKIPS, Hang
from tests.telemetry.diagnose.planted_large import guilty_in, models
from tests.telemetry.diagnose.planted_program import Op

AFTER_S = 10.0
_WAITS = {  # name of the wait in the program -> the span's name, its op and its phase
    "finish": ("grad_sync", "finish", "grad_sync"),
    "gather": ("param_gather", "wait", "param_gather"),
    "sums": ("world_sums", "wait", "grad_sync"),
    "norms": ("norm_sum", "world", "optimizer"),
}


def ongoing(hang: Hang) -> dict[int, Ongoing]:
    """By rank; nothing of those that say nothing."""
    stopped = () if hang.kind in SKIPS else hang.guilty
    return {rank: _record(hang, rank) for rank in hang.blocked if rank not in stopped}


def _record(hang: Hang, rank: int) -> Ongoing:
    state, op = hang.job.ranks[rank], hang.blocked[rank]
    page = state.page
    numbers = {group: number for group, number in state.numbers.items() if number}
    name, what, phase = _WAITS.get(
        op.phase or "", ("tp_transfer", state.last_tensor, page["phase"])
    )
    chunk, micro_batch = page.get("chunk"), page.get("micro_batch")
    group, seq = op.group, numbers.get(op.group or "")
    if op.kind == "await":
        assert op.group is not None
        fed = _fed(hang, rank)
        name, phase, chunk, micro_batch = "pp_wait", "recv", fed.chunk, fed.micro_batch
        what = "RA" if op.group.endswith("activation") else "RG"
        seq = state.posted[f"taken {op.group}"] + 1
    if name == "norm_sum":
        seq = None
    since_ns = int(state.now_s * 1e9)
    return Ongoing(
        rank=rank,
        t_ns=since_ns + int(AFTER_S * 1e9),
        waited_ns=int(AFTER_S * 1e9),
        name=name,
        step=state.step,
        phase=str(phase),
        chunk=chunk,  # type: ignore[arg-type]
        micro_batch=micro_batch,  # type: ignore[arg-type]
        op=what,
        group=group,
        seq=seq,
        peers=peers(hang.layout.mesh, rank, group or "")
        if hang.layout.mesh.world_size < 64
        else (),
        posted=numbers,
    )


def _fed(hang: Hang, rank: int) -> Op:
    """The computation that the awaited transfer feeds."""
    job = hang.job
    return job.programs[job.stage[rank]][job.ranks[rank].index + 1]


def enlarged(hang: Hang, data: int, seed: int) -> tuple[Mesh, dict[int, Ongoing], tuple[int, ...]]:
    """(mesh, records, guilty ranks) of the same hang with `data` replicas: those that are added do
    what a healthy one of the small job does, some ms earlier or later."""
    mesh = replace(hang.layout.mesh, data=data)
    recorded, rng = ongoing(hang), random.Random(seed)
    found = {}
    for rank, model in enumerate(models(hang, mesh)):
        record = recorded.get(model)
        if record is not None:
            is_added = mesh.coordinates(rank).dp_rank >= hang.layout.mesh.data
            jitter_ns = rng.randrange(2_000_000) if is_added else 0
            found[rank] = replace(record, rank=rank, t_ns=record.t_ns + jitter_ns, peers=())
    return mesh, found, guilty_in(hang, mesh)
