"""The rows of a synthetic run: headers, steps, sums, incidents, counters, what hangs, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.telemetry.faults import Congestion, Hang, LossSpike, MemoryPressure
from megascale.telemetry.store.tables import SUM_COUNT, SUM_NS

if TYPE_CHECKING:
    from benchmarks.telemetry.synthetic import Block, Job

SPEED_BYTES_PER_S = 50e9
COUNTER_S = 0.01
COUNTED_STEPS = 3
IDEAL_MFU = 0.60
Row = dict[str, Any]


def host_name(host: int) -> str:
    return f"node-{host:04d}"


def header_rows(job: Job, start: int, unix_ns: int) -> list[Row]:
    mesh = job.mesh
    return [
        {
            "rank": rank,
            "start": start,
            "epoch": start,
            "host": host_name(rank // job.ranks_per_host),
            "pid": 1000 + rank,
            "world_size": mesh.world_size,
            "tensor": mesh.tensor,
            "data": mesh.data,
            "pipeline": mesh.pipeline,
            "unix_ns": unix_ns + rank,
            "device": "NVIDIA H200",
            "versions": json.dumps({"megascale": "0.1.0", "torch": "2.13.0"}),
        }
        for rank in range(mesh.world_size)
    ]


def _who_when(job: Job, block: Block) -> dict[str, Any]:
    import pyarrow

    num_ranks = job.mesh.world_size
    return {
        "rank": pyarrow.array(np.tile(np.arange(num_ranks, dtype=np.int32), len(block.step_S))),
        "start": pyarrow.array(np.full(num_ranks * len(block.step_S), block.start, dtype=np.int32)),
        "step": pyarrow.array(np.repeat(block.step_S.astype(np.int64), num_ranks)),
    }


def steps_table(job: Job, block: Block) -> Any:
    import pyarrow

    num_ranks = job.mesh.world_size
    dur_ns = np.rint(block.times.optimizer_end.reshape(-1) * 1e9).astype(np.int64)
    begin_ns = np.repeat(block.begin_ns_S, num_ranks)
    sampled = np.repeat([job.is_sampled(int(step)) for step in block.step_S], num_ranks)
    launch_ns = (dur_ns * 0.7).astype(np.int64)
    columns = _who_when(job, block) | {
        "t0_ns": pyarrow.array(begin_ns),
        "dur_ns": pyarrow.array(dur_ns),
        "clock": pyarrow.DictionaryArray.from_arrays(
            np.zeros(len(dur_ns), np.int8), ["device"]
        ).cast("string"),
        "sampled": pyarrow.array(sampled),
        "launch_ns": pyarrow.array(launch_ns),
        "issued_ns": pyarrow.array(begin_ns + launch_ns),
    }
    return pyarrow.table(columns)


def sums_table(job: Job, block: Block) -> Any:
    import pyarrow

    mesh = job.mesh
    shape = (len(block.step_S), mesh.pipeline, mesh.data, mesh.tensor)
    columns = _who_when(job, block)
    rng = np.random.default_rng((job.seed, block.start, int(block.step_S[0]), 1))
    for phase, seconds in block.times.phases.items():
        whole = np.broadcast_to(seconds, shape).reshape(-1)
        count = block.times.counts[phase]
        ns = np.rint(whole * 1e9).astype(np.int64)
        if job.jitter_ns:
            ns = np.maximum(0, ns + rng.integers(-job.jitter_ns, job.jitter_ns, len(ns)))
        columns[SUM_NS + phase] = pyarrow.array(ns)
        columns[SUM_COUNT + phase] = pyarrow.array(np.full(len(whole), count, np.int32))
    return pyarrow.table(columns)


def incident_rows(job: Job, block: Block) -> list[Row]:
    found: list[Row] = []
    last = len(block.step_S) - 1

    def add(rank: int, at: int, name: str, **detail: Any) -> None:
        moment_ns = int(block.begin_ns_S[at] + 1e9 * block.times.step_s_S[at])
        found.append(
            {
                "rank": rank,
                "start": block.start,
                "step": int(block.step_S[at]),
                "name": name,
                "t_ns": moment_ns,
                "detail": json.dumps(detail),
            }
        )

    for at, step in enumerate(block.step_S.tolist()):
        if step % 50 == 0:
            add(0, at, "checkpoint", path=f"checkpoints/step-{step:08d}")
    if block.step_S[last] != job.num_steps:
        return found
    pressed = {f.host: f for f in job.faults if isinstance(f, MemoryPressure)}
    for rank in range(job.mesh.world_size):
        under = rank // job.ranks_per_host in pressed
        share = 0.99 if under else 0.8
        add(
            rank,
            last,
            "resources",
            memory_bytes=int(share * (140 << 30)),
            memory_fraction=share,
            active_bytes=int((share - 0.05) * (140 << 30)),
            num_alloc_retries=200 if under else 0,
            num_ooms=int(under and rank % job.ranks_per_host == 0),
        )
    for host in pressed:
        add(host * job.ranks_per_host, last, "out_of_memory", error="CUDA out of memory")
    return found


def counter_rows(job: Job, block: Block) -> list[Row]:
    """Of the last steps, where congestion is planted: every port moves its bytes while gradients
    are reduced, a congested one more slowly and with marks."""
    congested = {f.host: f for f in job.faults if isinstance(f, Congestion)}
    if not congested or block.step_S[-1] != job.num_steps:
        return []
    found: list[Row] = []
    times, mesh = block.times, job.mesh
    for host in range(-(-mesh.world_size // job.ranks_per_host)):
        factor = congested[host].factor if host in congested else 1.0
        moved, marks = 0.0, 0
        for at in range(max(0, len(block.step_S) - COUNTED_STEPS), len(block.step_S)):
            begin_s = float(times.launch[at].max())
            usual_s = (float(times.gradient_end[at].max()) - begin_s) / max(
                [f.factor for f in congested.values()]
            )
            begin_ns, length_s = int(block.begin_ns_S[at]), float(times.step_s_S[at])
            for tick in range(int(length_s / COUNTER_S)):
                if 0 <= tick * COUNTER_S - begin_s < usual_s * factor:
                    moved += 0.9 * SPEED_BYTES_PER_S * COUNTER_S / factor
                    marks += 20 * (factor > 1)
                found.append(
                    {
                        "rank": -1,
                        "start": block.start,
                        "host": host_name(host),
                        "port": "mlx5_0/1",
                        "t_ns": begin_ns + round(tick * COUNTER_S * 1e9),
                        "sent_bytes": int(moved),
                        "received_bytes": int(moved),
                        "speed_bytes_per_s": SPEED_BYTES_PER_S,
                        "congestion": marks,
                    }
                )
    return found


def ongoing_rows(job: Job, block: Block) -> list[Row]:
    hangs = [f for f in job.faults if isinstance(f, Hang)]
    if not hangs:
        return []
    (hang,) = hangs
    step = int(block.step_S[-1]) + 1
    end_ns = int(block.begin_ns_S[-1] + 1e9 * block.times.step_s_S[-1])
    found = []
    for rank in sorted({*range(job.mesh.world_size)} - {*hang.silent}):
        wait = _wait(job, hang, rank)
        found.append(
            {
                "rank": rank,
                "start": block.start,
                "step": step,
                "t_ns": end_ns + 10_000_000_000 + rank,
                "waited_ns": 10_000_000_000 - rank,
                "seq": step if wait["group"] == "world" else 2 * step,
                "error": None,
                "posted": json.dumps(
                    {wait["group"]: step if wait["group"] == "world" else 2 * step}
                ),
                **wait,
                "peers": json.dumps([peer for peer in wait["peers"] if peer != rank]),
            }
        )
    return found


def _wait(job: Job, hang: Hang, rank: int) -> Row:
    """What `rank` waits in: for a silent one of its own groups, else for those that wait."""
    mesh = job.mesh
    at, guilty = mesh.coordinates(rank), [mesh.coordinates(r) for r in hang.silent]
    same_pipeline = [g for g in guilty if (g.dp_rank == at.dp_rank)]
    if hang.group in ("tensor", "pipeline") and same_pipeline:
        stage = same_pipeline[0].pp_rank
        if stage == at.pp_rank:
            peers = list(range(rank - at.tp_rank, rank - at.tp_rank + mesh.tensor))
            return _row("tp_gemm_reduce_scatter", "forward", "reduce_scatter", "tensor", peers)
        step = 1 if stage > at.pp_rank else -1
        peer = mesh.global_rank(tp_rank=at.tp_rank, dp_rank=at.dp_rank, pp_rank=at.pp_rank + step)
        payload = "gradient" if step > 0 else "activation"
        channel = f"{at.pp_rank + step}->{at.pp_rank} {payload}"
        return _row("pp_wait", "backward" if step > 0 else "forward", payload, channel, [peer])
    in_data = any((g.tp_rank, g.pp_rank) == (at.tp_rank, at.pp_rank) for g in guilty)
    if hang.group in ("tensor", "pipeline") or (hang.group == "data" and in_data):
        first = mesh.global_rank(tp_rank=at.tp_rank, dp_rank=0, pp_rank=at.pp_rank)
        peers = [first + number * mesh.tensor for number in range(mesh.data)]
        return _row("grad_sync", "grad_sync", "reduce_scatter", "data", peers)
    return _row("world_sums", "grad_sync", "all_reduce", "world", [])  # everybody: not a list


def _row(name: str, phase: str, op: str, group: str, peers: list[int]) -> Row:
    return {"name": name, "phase": phase, "op": op, "group": group, "peers": peers}


def metrics_lines(job: Job, block: Block) -> Iterator[str]:
    mesh, times = job.mesh, block.times
    rng = np.random.default_rng((job.seed, block.start, int(block.step_S[0])))
    noise_S = rng.normal(0, 0.01, len(block.step_S))
    tokens = 2048 * job.micro_batches * mesh.data
    bubble = (mesh.pipeline - 1) / (job.micro_batches * job.chunks_per_stage)
    ideal_s = job.compute_s * (1 + bubble)
    pressed = [f for f in job.faults if isinstance(f, MemoryPressure)]
    for at, step in enumerate(block.step_S.tolist()):
        step_s = float(times.step_s_S[at]) + job.gap_s
        loss = 2 + 8 * (step + 1) ** -0.3 + float(noise_S[at])
        norm = 1.0 + 0.1 * float(noise_S[-1 - at])
        for fault in job.faults:
            if isinstance(fault, LossSpike) and 0 <= step - fault.step < fault.num_steps:
                loss, norm = loss + fault.height, norm * 10
        retries = sum(10 * max(0, step - f.from_step) for f in pressed if f.host == 0)
        yield (
            json.dumps(
                {
                    "time": round((int(block.begin_ns_S[at]) / 1e9) + step_s, 3),
                    "step": step,
                    "loss": round(loss, 5),
                    "grad_norm": round(norm, 5),
                    "lr": 3e-4,
                    "step_s": round(step_s, 6),
                    "tokens_per_s": round(tokens / step_s, 1),
                    "tokens_per_s_per_gpu": round(tokens / step_s / mesh.world_size, 3),
                    "mfu": round(IDEAL_MFU * ideal_s / step_s, 5),
                    "memory_bytes": int((0.99 if retries else 0.8) * (140 << 30)),
                    "memory_fraction": 0.99 if retries else 0.8,
                    "num_alloc_retries": retries,
                    "num_ooms": 0,
                    "skipped_steps": 0,
                }
            )
            + "\n"
        )
