"""Synthetic runs of any size, with planted faults, as a run folder that readers open.

    python -m benchmarks.telemetry.synthetic FOLDER --mesh 8,192,8 --steps 1000

`write_segments` writes the store's segments at once, vectorised (12,288 ranks x 1,000 steps in well
under a minute); `write_lines` writes a line file a rank, for small runs, as the recorder would.
Both describe the same run of the same seed. What the times mean is in `synthetic_times.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.telemetry.faults import Fault, Restart
from benchmarks.telemetry.synthetic_lines import lines_of
from benchmarks.telemetry.synthetic_program import Program
from benchmarks.telemetry.synthetic_spans import SpanTable, add_step
from benchmarks.telemetry.synthetic_tables import (
    counter_rows,
    header_rows,
    incident_rows,
    metrics_lines,
    ongoing_rows,
    steps_table,
    sums_table,
)
from benchmarks.telemetry.synthetic_times import Layout, Times, step_times
from megascale.cluster.chaos.noise import MODEL, Noise
from megascale.plan.actions import PipelineShape
from megascale.telemetry.store.segments import arrow_schema, store_folder, write_segment
from megascale.telemetry.writer import line_file
from megascale.topology import Mesh

_BLOCK_CELLS = 1_000_000  # steps times ranks that are held in memory at a time


@dataclass(frozen=True, kw_only=True)
class Job:
    """A synthetic run.

    compute_s   forward and backward of a rank in a step, without waits
    span_steps  the sampled steps; None: every tenth
    gap_s       from one step's end to the next one's begin
    jitter_ns   of each sum, by which clocks differ (of sums only: spans still add up)
    """

    mesh: Mesh = field(default_factory=lambda: Mesh(2, 4, 1))
    num_steps: int = 60
    ranks_per_host: int = 8
    micro_batches: int = 8
    schedule: str = "1f1b"
    chunks_per_stage: int = 1
    compute_s: float = 1.0
    gap_s: float = 0.001
    jitter_ns: int = 0
    seed: int = 0
    span_steps: Sequence[int] | None = None
    faults: Sequence[Fault] = ()
    noise: Mapping[str, float] = field(default_factory=lambda: MODEL)
    begin_unix_ns: int = 1_780_000_000_000_000_000

    @property
    def layout(self) -> Layout:
        return Layout(self.mesh, self.ranks_per_host, self.compute_s)

    def is_sampled(self, step: int) -> bool:
        return step % 10 == 0 if self.span_steps is None else step in self.span_steps

    def starts(self) -> list[tuple[int, int]]:
        """First and last step of each start."""
        restarts = sorted(
            (f for f in self.faults if isinstance(f, Restart)), key=lambda f: f.at_step
        )
        firsts = [1, *(f.back_to + 1 for f in restarts)]
        lasts = [*(f.at_step for f in restarts), self.num_steps]
        return list(zip(firsts, lasts, strict=True))

    def pause_before(self, start: int) -> float:
        """Seconds between the last start's end and this one's header."""
        restarts = sorted(
            (f for f in self.faults if isinstance(f, Restart)), key=lambda f: f.at_step
        )
        return restarts[start - 1].pause_s if start else 0.0


@dataclass(frozen=True)
class Block:
    """Some steps of one start: `begin_ns_S` when each begins, wall clock."""

    start: int
    step_S: NDArray[np.int64]
    begin_ns_S: NDArray[np.int64]
    times: Times


def write_segments(run_dir: Path, job: Job) -> None:
    """The run's folder with its store, a segment a block of steps."""
    folder = store_folder(run_dir)
    folder.mkdir(parents=True)
    for tables in _all_tables(run_dir, job):
        write_segment(folder, tables, {})


def write_lines(run_dir: Path, job: Job) -> None:
    """The run's folder with a line file a rank; a line is an event of `megascale.events`."""
    (run_dir / "telemetry").mkdir(parents=True)
    written: dict[int, list[str]] = {}
    for tables in _all_tables(run_dir, job):
        for rank, lines in lines_of(job.mesh, tables).items():
            written.setdefault(rank, []).extend(lines)
    for rank, lines in written.items():
        path = line_file(run_dir, rank) if rank >= 0 else run_dir / "telemetry" / "node.jsonl"
        path.write_text("".join(lines))


def _all_tables(run_dir: Path, job: Job) -> Iterator[dict[str, Any]]:
    """The tables of one block after another; metrics and configuration on the way."""
    program = Program(
        job.schedule, PipelineShape(job.mesh.pipeline, job.chunks_per_stage, job.micro_batches)
    )
    _write_config(run_dir, job)
    begin_ns = job.begin_unix_ns
    last: Block | None = None
    for start, (first, until) in enumerate(job.starts()):
        begin_ns += round(job.pause_before(start) * 1e9)
        header = {"ranks": _table("ranks", header_rows(job, start, begin_ns))}
        begin_ns += round(5.0 * job.compute_s * 1e9)  # it loads and compiles
        for block in _blocks(job, program, start, first, until, begin_ns):
            tables = header | {
                "steps": steps_table(job, block),
                "sums": sums_table(job, block),
                "incidents": _table("incidents", incident_rows(job, block)),
                "counters": _table("counters", counter_rows(job, block)),
            }
            spans = _spans(job, program, block)
            if spans is not None:
                tables["spans"] = spans
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.writelines(metrics_lines(job, block))
            header, last = {}, block
            begin_ns = int(block.begin_ns_S[-1] + 1e9 * (block.times.step_s_S[-1] + job.gap_s))
            yield tables
    if last is not None and (rows := ongoing_rows(job, last)):
        yield {"ongoing": _table("ongoing", rows)}


def _blocks(
    job: Job, program: Program, start: int, first: int, last: int, begin_ns: int
) -> Iterator[Block]:
    mesh = job.mesh
    stage_R = np.repeat(np.arange(mesh.pipeline), mesh.data * mesh.tensor)
    model = {**job.noise, "ranks_per_host": job.ranks_per_host}
    # chips are the same in every start, so noise begins alike, too
    noise = Noise(stage_R, seed=job.seed, stage_s=job.compute_s, model=model)
    rng = np.random.default_rng((job.seed, start))
    most = max(1, min(100, _BLOCK_CELLS // mesh.world_size))
    for since in range(first, last + 1, most):
        step_S = np.arange(since, min(last + 1, since + most))
        keep = any(job.is_sampled(int(step)) for step in step_S)
        times = step_times(
            job.layout,
            program,
            noise.steps(len(step_S)),
            step_S,
            job.faults,
            rng,
            keep_computes=keep,
        )
        lengths_ns = np.rint((times.step_s_S + job.gap_s) * 1e9).astype(np.int64)
        begin_ns_S = begin_ns + np.concatenate([[0], np.cumsum(lengths_ns)[:-1]])
        begin_ns = int(begin_ns_S[-1] + lengths_ns[-1])
        yield Block(start, step_S, begin_ns_S, times)


def _spans(job: Job, program: Program, block: Block) -> Any | None:
    found = SpanTable()
    sampled = [(at, int(step)) for at, step in enumerate(block.step_S) if job.is_sampled(int(step))]
    for at, step in sampled:
        add_step(found, job.layout, program, block.times, at, step, int(block.begin_ns_S[at]))
    return found.table(block.start) if sampled else None


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    import pyarrow

    return pyarrow.Table.from_pylist(list(rows), schema=arrow_schema(name))


def _write_config(run_dir: Path, job: Job) -> None:
    mesh = job.mesh
    config = {
        "parallelism": {
            "tensor_parallel_size": mesh.tensor,
            "pipeline_parallel_size": mesh.pipeline,
            "virtual_pipeline_size": job.chunks_per_stage,
            "data_parallel_size": mesh.data,
            "pipeline_schedule": job.schedule,
            "join_weight_gradients": 1,
            "share_head": False,
        },
        "training": {
            "steps": job.num_steps,
            "micro_batch_size": 1,
            "global_batch_size": job.micro_batches * mesh.data,
            "seq_len": 2048,
        },
        "telemetry": {"span_interval": 10},
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.telemetry.synthetic")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mesh", default="2,4,1", help="tensor,data,pipeline")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", action="store_true", help="line files instead of segments")
    parser.add_argument("--spans", default="", help="the sampled steps; default every tenth")
    parser.add_argument(
        "--fault", action="append", default=[], help="as in faults.py: 'SlowRank(5, 0.1)'"
    )
    given = parser.parse_args()
    job = Job(
        mesh=Mesh(*(int(degree) for degree in given.mesh.split(","))),
        num_steps=given.steps,
        micro_batches=given.micro_batches,
        seed=given.seed,
        span_steps=[int(step) for step in given.spans.split(",")] if given.spans else None,
        faults=[_fault(text) for text in given.fault],
    )
    since = time.monotonic()
    (write_lines if given.lines else write_segments)(given.folder, job)
    print(f"{job.mesh.world_size} ranks x {job.num_steps} steps: {time.monotonic() - since:.1f} s")


def _fault(text: str) -> Fault:
    """`SlowRank(rank=5, share=0.1)`: a call of a class of `faults.py` with plain values."""
    import ast

    from benchmarks.telemetry import faults

    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call), text
    assert isinstance(call.func, ast.Name), text
    values = [ast.literal_eval(one) for one in call.args]
    named = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
    fault: Fault = getattr(faults, call.func.id)(*values, **named)
    return fault


if __name__ == "__main__":
    main()
