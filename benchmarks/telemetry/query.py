"""How long a large run's readers take: 12,288 ranks x 1,000 steps x 10 phases, stored.

    python -m benchmarks.telemetry.query [--mesh 8,192,8] [--steps 1000] [--keep FOLDER]

The run is synthetic (`synthetic.py`), with noise, jitter of each sum and a slow rank, so columns
compress as measured ones do. Timed with the files in the page cache, as those of a live run are:
the heat map query (`Run.phase_means` over all steps, ranks and phases; median of several), the same
with the first opening of the run, and each reader as it is asked by default. The heat map is
checked against sums that are added here, the stragglers for naming the slow rank and no other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import writable_file
from benchmarks.telemetry.faults import SlowRank
from benchmarks.telemetry.rows import RESULTS, Rows
from benchmarks.telemetry.synthetic import Job, write_segments
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.store.run import Run, open_run
from megascale.telemetry.store.segments import live_segments, store_folder
from megascale.topology import Mesh

ROUNDS = 5
MOST_QUERY_S = 2.0
MOST_PAGE_S = 3.0
PAGES = ("summary", "heat_map", "stragglers", "decomposition", "drift", "bubbles", "communication")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.telemetry.query")
    parser.add_argument("--mesh", default="8,192,8", help="tensor,data,pipeline")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--keep", type=Path, help="make the run there, or ask the one that is there"
    )
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    parser.add_argument("--commit", default="", help="of a clean copy without repository")
    given = parser.parse_args()
    mesh = Mesh(*(int(degree) for degree in given.mesh.split(",")))
    slow = mesh.world_size * 5 // 8
    with tempfile.TemporaryDirectory(prefix="megascale-query-") as temporary:
        folder = given.keep or Path(temporary) / "run"
        made_s = 0.0
        if not folder.exists():
            job = Job(
                mesh=mesh,
                num_steps=given.steps,
                micro_batches=16,
                jitter_ns=2000,
                span_steps=[given.steps - 20, given.steps - 10, given.steps],
                faults=[SlowRank(slow, 0.10)],
            )
            made_s, _ = _timed(lambda: write_segments(folder, job))
            print(f"made in {made_s:.1f} s", file=sys.stderr)
        command = f"python -m benchmarks.telemetry.query --mesh {given.mesh} --steps {given.steps}"
        rows = Rows(command, given.commit, given.output)
        return _measure(folder, slow, rows)


def _measure(folder: Path, slow: int, rows: Rows) -> int:
    opened_s, run = _timed(lambda: open_run(folder, catch_up=False))
    with run:
        first, last = run.steps()
        first_s, means = _timed(lambda: run.phase_means(first, last))
        _check(run, means, first, last)
        cpu_s = time.process_time()
        times = [_timed(lambda: run.phase_means(first, last))[0] for _ in range(ROUNDS)]
        cpu_s = (time.process_time() - cpu_s) / ROUNDS
        num_phases = len([name for name in means.phases if name != "gc"])
        size = f"{last - first + 1} steps x {num_phases} phases"
        shared: dict[str, Any] = {
            "of": size,
            "ranks": len(means.rank_R),
            "cores": len(os.sched_getaffinity(0)),
            "store_mb": _store_mb(folder),
            "load": round(os.getloadavg()[0], 2),
        }
        met = rows.add(
            "heat map query", "s", statistics.median(times), "<=", MOST_QUERY_S,
            opened_s=round(opened_s, 3), first_s=round(first_s, 3), worst_s=round(max(times), 3),
            cpu_s=round(cpu_s, 3),
            **shared,
        )  # fmt: skip
        for name in PAGES:
            took_s, answer = _timed(lambda name=name: READERS[name].ask(run, Window()))  # type: ignore[misc]
            print(f"{name}: {answer.summary}", file=sys.stderr)
            met = rows.add(f"reader {name}", "s", took_s, "<=", MOST_PAGE_S, **shared) and met
            if name == "stragglers":
                assert answer.data["ranks"] == [slow], answer.summary
    return 0 if met else 1


def _check(run: Run, means: Any, first: int, last: int) -> None:
    """The query's means against the same numbers, added step by step, of some ranks."""
    some = np.linspace(0, len(means.rank_R) - 1, 7).astype(int)
    ranks = ", ".join(str(int(means.rank_R[place])) for place in some)
    for phase in means.phases:
        table = run.query(
            f'SELECT rank, "ns:{phase}" AS ns FROM sums WHERE rank IN ({ranks}) '
            f"AND step BETWEEN {first} AND {last} ORDER BY rank, step"
        )
        rank, ns = (table.column(name).to_numpy() for name in ("rank", "ns"))
        expected = [float(ns[rank == means.rank_R[place]].mean()) / 1e6 for place in some]
        got = means.mean_ms_RP[some, means.phases.index(phase)]
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def _store_mb(folder: Path) -> float:
    return round(sum(one.num_bytes for one in live_segments(store_folder(folder))) / 1e6, 1)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    since = time.perf_counter()
    result = call()
    return time.perf_counter() - since, result


if __name__ == "__main__":
    sys.exit(main())
