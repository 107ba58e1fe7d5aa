"""Rows of `step` and `ladder` from finished runs (form: `benchmarks/README.md`)."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.config import RunConfig
from megascale.env import first_visible_gpu, installed_versions
from megascale.flux.bench.rows import gpu_facts
from megascale.train.bench.case import Case
from megascale.train.bench.ladder import Planned
from megascale.train.bench.measure import Run
from megascale.train.bench.records import roof_tflops
from megascale.train.run_folder import commit
from megascale.units import peak_tflops

Row = dict[str, Any]


@dataclass(frozen=True)
class Origin:
    """What all rows of a command share. `fields` are those of its start; a row adds its time."""

    fields: Mapping[str, Any]
    on_gpus: bool

    @classmethod
    def here(
        cls, *, num_ranks: int, on_gpus: bool, command: str, given_commit: str | None
    ) -> Origin:
        """`given_commit` is the user's word for a clean tree that has no repository."""
        known = commit()
        fields = {
            "num_devices": num_ranks,
            "commit": given_commit or known or "unknown",
            "dirty": not given_commit and (known is None or _tree_has_changes()),
            "versions": installed_versions(("torch", "triton")),
            "command": command,
        }
        return cls(fields, on_gpus)

    def now(self) -> Row:
        """The fields of a row that is written now, right after its run.

        The GPU is looked at through its driver: a CUDA context of this process would take memory
        from the ranks of the runs that follow.
        """
        facts = gpu_facts(first_visible_gpu()) if self.on_gpus else {"name": "cpu"}
        row = {
            "device": facts.pop("name", "unknown"),
            **self.fields,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if self.on_gpus:
            row["machine"] = facts
        return row


def step_row(
    case: Case,
    runs: Sequence[Run],
    origin: Origin,
    *,
    target: float | None,
    baselines: Mapping[str, float],
) -> Row:
    """The row of one case. `target` is the least MFU."""
    found = measured(runs)
    row = {
        "bench": "step",
        "case": case.keys,
        **found,
        "settings": case.settings,
        "baselines": dict(baselines),
    }
    roof = roof_of(case, runs)
    if roof:
        row["roof"] = roof
        row["baselines"]["roof"] = statistics.fmean(roof.values())
    row |= origin.now()
    if target is not None:
        row["target"] = {"op": ">=", "value": target}
        row["met"] = row["value"] is not None and row["value"] >= target
    else:
        row["met"] = None
    return row


def ladder_row(
    plan: Planned, case: Case, runs: Sequence[Run], below: Sequence[Row], origin: Origin
) -> Row:
    """The row of a rung; `below` are the rows of the rungs before it that have one.

    Gains are of MFU, as fractions. Without the baseline's row there is no sum of them.
    """
    found = measured(runs)
    before = below[-1] if below else None
    base = next((row for row in below if row["case"]["rung"] == "baseline"), None)
    is_base = plan.rung.name == "baseline"
    return {
        "bench": "ladder",
        "case": {**case.keys, **case.switches, "rung": plan.rung.name},
        **found,
        "gain": _difference(found, before),
        "sum_of_gains": 0.0 if is_base and found["value"] is not None else _difference(found, base),
        "over": before["case"]["rung"] if before else None,
        "speedup": _ratio(found, before),
        "total_speedup": 1.0 if is_base else _ratio(found, base),
        "section": plan.rung.section,
        "paper_gain": plan.rung.paper_gain,
        "settings": list(plan.settings),
        "losses": runs[-1].losses,
        "baselines": {},
        "met": None,
        **origin.now(),
    }


def roof_of(case: Case, runs: Sequence[Run]) -> dict[str, float]:
    """MFU of the roof before and after the steps, the median of runs; empty where it was not
    measured or the device's peak is not known."""
    found: dict[str, list[float]] = {}
    for run in runs:
        peak = peak_of(case.config, run)
        for when, tflops in (roof_tflops(run.records) or {}).items():
            if peak is not None:
                found.setdefault(when, []).append(tflops / peak)
    return {when: statistics.median(values) for when, values in found.items()}


def peak_of(config: RunConfig, run: Run) -> float | None:
    """TFLOP/s of the run's device: the recipe's, else the table's."""
    known = peak_tflops(run.records[0].header.device or "") if run.records else None
    return config.metrics.peak_tflops or (known[0] if known else None)


def measured(runs: Sequence[Run]) -> Row:
    """The numbers of a case: the median over its runs of each run's median step."""
    timed = [step for run in runs for step in run.timed]
    median = statistics.median(
        statistics.median(step["step_s"] for step in run.timed) for run in runs
    )
    middle = min(timed, key=lambda step: abs(step["step_s"] - median))
    last = runs[-1]
    return {
        "metric": "mfu",
        "value": middle.get("mfu"),
        "mfu_causal": middle.get("mfu_causal"),
        "step_s": median,
        "tokens_per_s_per_gpu": middle["tokens_per_s_per_gpu"],
        **last.facts,  # of all ranks
        "peak_gb": max(run.facts.get("peak_gb", 0.0) for run in runs) or None,
        "first_loss": last.losses[0],
        "last_loss": last.losses[-1],
        "stats": {
            "runs": len(runs),
            "rounds": len(timed),
            "min": min(step["step_s"] for step in timed),
            "max": max(step["step_s"] for step in timed),
        },
    }


def _difference(row: Row, other: Row | None) -> float | None:
    if other is None or row["value"] is None or other["value"] is None:
        return None
    return float(row["value"] - other["value"])


def _ratio(row: Row, other: Row | None) -> float | None:
    name = "tokens_per_s_per_gpu"
    return None if other is None else float(row[name] / other[name])


def _tree_has_changes() -> bool:
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return bool(changed.stdout.strip())
