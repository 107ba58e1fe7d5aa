"""A tiny recipe for the ladder, and runs that were never made."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megascale.events import Event, Incident, Step, Sums, run_header
from megascale.topology import Mesh
from megascale.train.bench.case import Case
from megascale.train.bench.ladder import Planned, plan_ladder
from megascale.train.bench.measure import Run
from megascale.train.bench.records import RankRecord, record_of

TINY = """
[model]
hidden_size = 32
num_layers = 4
num_heads = 4
ffn_hidden_size = 64
vocab_size = 256
[training]
seq_len = 16
global_batch_size = 4
steps = 5
[data]
synthetic = true
[metrics]
peak_tflops = 0.01
"""
TP2 = "parallelism.tensor_parallel_size=2"
PP2 = "parallelism.pipeline_parallel_size=2"
DP2 = Mesh(data=2)
FIRST_LOSS = math.log(256) + 32 * 0.02**2 / 2


def write_tiny(folder: Path, text: str = TINY) -> Path:
    recipe = folder / "tiny.toml"
    recipe.write_text(text)
    return recipe


def plan_tiny(folder: Path, *overrides: str, num_ranks: int) -> list[Planned]:
    """The ladder of the tiny recipe, on a machine without GPUs."""
    return plan_ladder(write_tiny(folder), overrides, num_ranks, model=None, num_gpus=0)


def planted_run(
    case: Case, *, step_s: float = 0.1, loss: float = FIRST_LOSS, norm: float = 1.0
) -> Run:
    """Losses fall from `loss`; a timed step takes `step_s`, the others 9 s."""
    training = case.config.training
    tokens = training.global_batch_size * training.seq_len / case.num_ranks
    steps: list[dict[str, Any]] = []
    for number in range(training.steps):
        seconds = step_s if 3 <= number < training.steps - 1 else 9.0
        steps.append(
            {
                "step": number + 1,
                "loss": loss - 0.01 * number,
                "grad_norm": norm,
                "step_s": seconds,
                "mfu": 0.04 / seconds,
                "mfu_causal": 0.03 / seconds,
                "tokens_per_s_per_gpu": tokens / seconds,
                "memory_bytes": 1_000_000_000,  # of rank 0, which is not the one that counts
            }
        )
    return Run(steps, [planted_record(rank, len(steps), step_s) for rank in range(2)])


def planted_record(rank: int, num_steps: int, step_s: float, *, mesh: Mesh = DP2) -> RankRecord:
    """Rank 1 holds 2 GB, rank 0 half; a host launches for 30 ms, 40 on rank 0, 10 of them waiting
    for data, and is done 20 ms before the device, 5 on rank 1. A fifth of the step is waiting."""
    dur_ns = round(step_s * 1e9)
    events: list[Event] = [run_header(mesh, rank, host="here")]
    for step in range(1, num_steps + 1):
        sums = {"data_wait": 10_000_000, "pp_wait": dur_ns // 10, "world_sums": dur_ns // 10}
        events += [
            Sums(
                rank=rank,
                step=step,
                sums={name: {"total_ns": ns, "count": 1} for name, ns in sums.items()},
            ),
            Step(
                rank=rank,
                step=step,
                t0_ns=step * dur_ns,
                dur_ns=dur_ns,
                clock="device",
                sampled=False,
                launch_ns=40_000_000 - 10_000_000 * rank,
                issued_ns=(step + 1) * dur_ns - (20_000_000, 5_000_000)[rank],
            ),
        ]
    resources = {"memory_bytes": (rank + 1) * 1_000_000_000, "forms": {f"gemm_rs m{rank}": "plain"}}
    events.append(Incident(rank=rank, name="resources", t_ns=0, detail=resources))
    return record_of(events)
