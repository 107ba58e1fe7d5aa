"""The paper's tables at the paper's size, as cases: Table 2, Table 3 rung by rung, Figure 9.

Table 3 is a ladder: each rung changes one thing of the case before it, and what it gains follows
from the work, bytes and actions that it changes (MegaScale 3, 6.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megascale.plan.case import Case
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import load_cluster
from megascale.plan.validate.choices import CHOSEN, Choices
from megascale.plan.validate.published import (
    Printed,
    fig9_rows,
    megascale_case,
    printed,
    table2_rows,
)
from megascale.plan.validate.rows import Row, seconds_of_mfu
from megascale.plan.validate.scale import fit_fixed_s, with_scale


@dataclass(frozen=True)
class Rung:
    """A line of Table 3: its name there, and what it changes of the case above it."""

    name: str
    of_model: dict[str, Any]
    of_software: dict[str, Any]
    of_job: dict[str, Any]


def _rungs(choices: Choices) -> tuple[Rung, ...]:
    return (
        Rung("baseline", {}, {}, {}),
        Rung("parallel block", {"block": "parallel"}, {}, {}),
        Rung("sliding window", {"attention_window": choices.window}, {}, {}),
        Rung("TP overlap", {}, {"tensor_overlap": "chunked"}, {}),
        Rung("PP overlap", {}, {"transfers": "decoupled"}, {}),
        Rung("DP overlap", {}, {"overlap_grad_reduce": True, "overlap_param_gather": True}, {}),
        Rung("efficient operators", {}, {"operators": "fused", "attention": "flash"}, {}),
        Rung("misc", {}, {"host_ahead": True}, {}),
        Rung("LAMB, batch x3", {}, {}, {"optimizer": "lamb"}),
    )


def table3_rows(cluster: Cluster | None = None, choices: Choices = CHOSEN) -> list[Row]:
    """Table 3: cumulative, 256 devices, batch 256 and in the last rung 768."""
    cluster = cluster or load_cluster("paper")
    lines = list(printed("table3"))
    case = megascale_case(lines[0], choices, system="megatron-lm")
    rows = []
    for rung, line in zip(_rungs(choices), lines, strict=True):
        assert rung.name == line["rung"], (rung.name, line["rung"])
        case = _climbed(case, rung, line)
        peak = cluster.device.peak_tflops
        seconds = seconds_of_mfu(case.job, line["gpus"], line["mfu"], peak)
        rows.append(
            Row(
                line.set, "megascale", line["model"], rung.name, case, cluster, seconds, line.source
            )
        )
    return rows


def _climbed(case: Case, rung: Rung, line: Printed) -> Case:
    model = case.job.model.model_copy(update=rung.of_model)
    job = replace(case.job, model=model, global_batch_size=line["batch"], **rung.of_job)
    return replace(case, job=job, software=replace(case.software, **rung.of_software))


PAPER: dict[str, Callable[..., list[Row]]] = {
    "table2": table2_rows,
    "table3": table3_rows,
    "fig9": fig9_rows,
}


def replay(name: str, cluster: Cluster | None = None, choices: Choices = CHOSEN) -> list[Row]:
    """The rows of `table2`, `table3` or `fig9`, with what the paper's cluster does to them."""
    assert name in PAPER, f"replay is one of {list(PAPER)}, got {name!r}"
    cluster = cluster or load_cluster("paper")
    return with_scale(PAPER[name](cluster, choices), fixed_s_of(cluster, choices))


def fixed_s_of(cluster: Cluster, choices: Choices = CHOSEN) -> float:
    """The one constant, fitted on Table 2's Megatron-LM rows."""
    return fit_fixed_s([row for row in table2_rows(cluster, choices) if row.fitted])
