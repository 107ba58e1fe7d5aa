"""Rows printed in papers (`published.toml`) as cases.

Korthikanti's and Narayanan's clusters are Selene's (2205.05198, 2104.04473): A100 80 GB nodes of
eight with a 200 Gb/s NIC a device, as in `a100.toml`. MegaScale's is `paper.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from megascale.config import ModelConfig
from megascale.plan.case import Case, Job, Layout
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import load_cluster
from megascale.plan.validate.choices import CHOSEN, Choices
from megascale.plan.validate.rows import Row, seconds_of_mfu
from megascale.plan.validate.systems import SYSTEMS

SEQ_LEN = 2048  # of every printed row
_GPT: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "bias": "all",
    "tie_embeddings": True,
    "max_seq_len": SEQ_LEN,
}


@dataclass(frozen=True)
class Printed:
    """One printed row: its set's source and the columns that it has."""

    set: str
    source: str
    cells: dict[str, Any]

    def __getitem__(self, column: str) -> Any:
        return self.cells[column]

    def number(self, column: str) -> float | None:
        """The cell, or None where the paper prints nothing."""
        cell = self.cells.get(column, "")
        return None if cell == "" else float(cell)


@cache
def _tables() -> dict[str, Any]:
    text = files("megascale.plan.validate").joinpath("published.toml").read_text("utf-8")
    return tomllib.loads(text)


def printed(name: str) -> Iterator[Printed]:
    """The rows of set `name`, in the paper's order."""
    table = _tables()["sets"][name]
    for row in table["rows"]:
        yield Printed(name, table["source"], dict(zip(table["columns"], row, strict=True)))


def published_model(name: str, **more: Any) -> ModelConfig:
    """A model of the papers: a GPT with tied embeddings, as Megatron-LM builds it."""
    return ModelConfig.model_validate({**_GPT, **_tables()["models"][name], **more})


def megascale_case(row: Printed, choices: Choices, *, system: str) -> Case:
    """A row of MegaScale's as a case of Megatron-LM or MegaScale."""
    changes: dict[str, Any] = {}
    if system == "megascale":
        changes = {"block": "parallel", "attention_window": choices.window}
    model = published_model(
        row["model"],
        hidden_dropout=choices.dropout,
        **changes,
    )
    optimizer: Literal["adamw", "lamb"] = "lamb" if system == "megascale" else "adamw"
    return Case(
        Job(model, row["batch"], SEQ_LEN, optimizer),
        replace(
            _layout(row, choices.micro_batch_size),
            recompute=choices.recompute,
            zero_stage=choices.zero_stage,
        ),
        SYSTEMS[system],
    )


def _layout(row: Printed, micro_batch_size: int) -> Layout:
    tensor, pipeline = row["tp"], row["pp"]
    virtual = int(row.number("vp") or 1)
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        data=row["gpus"] // (tensor * pipeline),
        micro_batch_size=micro_batch_size,
        zero_stage=0,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
    )


def korthikanti_rows(cluster: Cluster | None = None) -> list[Row]:
    """Table 5 and the abstract's row with data parallelism of eight."""
    cluster = cluster or load_cluster("a100")
    rows = []
    for row in printed("korthikanti"):
        model = published_model(row["model"], hidden_dropout=0.1, attention_dropout=0.1)
        full = row["system"] == "megatron-full"
        layout = replace(_layout(row, row["mbs"]), recompute="full" if full else "selective")
        job = Job(model, row["batch"], SEQ_LEN)
        share, seconds = row.number("mfu"), row.number("step_s")
        if seconds is None:
            assert share is not None, row
            seconds = seconds_of_mfu(job, row["gpus"], share, cluster.device.peak_tflops)
        label = f"{'full' if full else 'selective'}, DP {layout.data}"
        case = Case(job, layout, SYSTEMS[row["system"]])
        rows.append(
            Row(
                row.set,
                row["system"],
                row["model"],
                label,
                case,
                cluster,
                seconds,
                row.source,
                fitted=row["model"] in ("gpt-22b", "gpt-175b"),
            )
        )
    return rows


def narayanan_rows(cluster: Cluster | None = None, micro_batch_size: int = 1) -> list[Row]:
    """Table 1: seconds from the printed TFLOP/s, whose FLOPs count the recomputed forward."""
    cluster = cluster or load_cluster("a100")
    rows = []
    for row in printed("narayanan"):
        model = published_model(row["model"], hidden_dropout=0.1, attention_dropout=0.1)
        layout = replace(_layout(row, micro_batch_size), recompute="full")
        case = Case(Job(model, row["batch"], SEQ_LEN), layout, SYSTEMS[row["system"]])
        seconds = full_flops(model, row["batch"]) / (row["gpus"] * row["tflops"] * 1e12)
        rows.append(
            Row(
                row.set,
                row["system"],
                row["model"],
                f"micro-batch {micro_batch_size}",
                case,
                cluster,
                seconds,
                row.source,
            )
        )
    return rows


def full_flops(model: ModelConfig, batch: int) -> float:
    """Equation 3 of 2104.04473: with full recomputation, 96 B s l h^2 (1 + s/6h + V/16lh)."""
    layers, hidden = model.num_layers, model.hidden_size
    attention, head = SEQ_LEN / (6 * hidden), model.vocab / (16 * layers * hidden)
    return 96.0 * batch * SEQ_LEN * layers * hidden**2 * (1 + attention + head)


def table2_rows(cluster: Cluster | None = None, choices: Choices = CHOSEN) -> list[Row]:
    """Table 2, both systems; the Megatron-LM rows are what two constants are fitted on."""
    cluster = cluster or load_cluster("paper")
    rows = []
    for row in printed("table2"):
        system = row["system"]
        case = megascale_case(row, choices, system=system)
        label = f"batch {row['batch']}"
        fitted = system == "megatron-lm"
        rows.append(
            Row(
                row.set,
                system,
                row["model"],
                label,
                case,
                cluster,
                row["step_s"],
                row.source,
                fitted,
            )
        )
    return rows


def fig9_rows(cluster: Cluster | None = None, choices: Choices = CHOSEN) -> list[Row]:
    """Figure 9: 530B, the batch grows with the devices."""
    cluster = cluster or load_cluster("paper")
    rows = []
    for row in printed("fig9"):
        case = megascale_case(row, choices, system=row["system"])
        peak = cluster.device.peak_tflops
        seconds = seconds_of_mfu(case.job, row["gpus"], row["mfu"], peak)
        label = f"batch {row['batch']}"
        rows.append(
            Row(row.set, row["system"], row["model"], label, case, cluster, seconds, row.source)
        )
    return rows
