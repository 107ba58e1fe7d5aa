"""Fits the A100's few free numbers on a stated part of the measured steps; the rest is held out.

    python -m megascale.plan.validate.fit --data FILE

prints the numbers to put into `machine/catalogue/a100.toml`. Fitted are three:

device.gemm.share           of the peak, by a very large product
device.memory.shares.scores of the bandwidth, by passes over attention scores (softmax, dropout)
overlap.compute_nvlink      slow-down of a product beside NCCL's kernels

on Korthikanti's rows of 22B and 175B, and on two of vTrain's four models, drawn by `SEED`. Split by
models: rows of one model differ by a knob. Each of the two sets counts alike. The loss is a
pseudo-Huber one of log errors with its bend at 3 %, and an error above 12 % counts as 12 %: single
rows of vTrain's are twice as slow as their neighbours, which no smooth curve should chase.
The search is a compass search without randomness, so the same data gives the same numbers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt
from pathlib import Path

from megascale.plan.machine.minimise import Numbers, minimise
from megascale.plan.validate.external import read_external
from megascale.plan.validate.machines import Machines, load_machines
from megascale.plan.validate.published import korthikanti_rows
from megascale.plan.validate.rows import Row
from megascale.plan.validate.scale import predict_s
from megascale.plan.validate.scores import Predicted, scores

SEED = 0
BEND, MOST = 0.03, 0.12
BOUNDS = {
    "device.gemm.share": (0.70, 1.0),
    "device.memory.shares.scores": (0.30, 0.92),
    "overlap.compute_nvlink": (1.0, 2.0),
}
VTRAIN_MODELS = ("GPT-175B", "GPT-18.4B", "GPT-3.6B", "GPT-39.1B")


def fitted_models(seed: int = SEED) -> frozenset[str]:
    """The vTrain models that are fitted on; the others are held out."""
    return frozenset(random.Random(seed).sample(VTRAIN_MODELS, 2))


def loss_of(rows: Sequence[Row]) -> float:
    """Mean loss of the rows' log errors."""
    return sum(_loss(log(predict_s(row) / row.measured_s)) for row in rows) / len(rows)


def _loss(error: float) -> float:
    return sqrt(1.0 + (min(abs(error), MOST) / BEND) ** 2) - 1.0


def fit(korthikanti: Sequence[Row], vtrain: Sequence[Row], machines: Machines) -> Numbers:
    """The numbers of `BOUNDS` with the least loss on these rows, from those of `machines`."""

    def loss(numbers: Numbers) -> float:
        tried = machines.with_a100(tables_of(numbers))
        printed = [replace(row, cluster=tried.a100) for row in korthikanti]
        external = [replace(row, cluster=tried.a100_half_network) for row in vtrain]
        return loss_of(printed) + loss_of(external)

    device, overlap = machines.a100.device, machines.a100.overlap
    start = {
        "device.gemm.share": device.gemm.share,
        "device.memory.shares.scores": device.memory.shares.get("scores", device.memory.share),
        "overlap.compute_nvlink": overlap.compute_nvlink,
    }
    return minimise(loss, start, BOUNDS, rounds=40, first_step=0.1)


def tables_of(numbers: Numbers) -> dict[str, dict[str, object]]:
    """Numbers by dotted names as tables of a cluster file."""
    tables: dict[str, dict[str, object]] = {}
    for name, value in numbers.items():
        *sections, key = name.split(".")
        table: dict[str, object] = tables.setdefault(sections[0], {})
        for section in sections[1:]:
            inner = table.setdefault(section, {})
            assert isinstance(inner, dict), name
            table = inner
        table[key] = value
    return tables


def main() -> None:
    """Fit, and say how well: on what was fitted, and on what was held out."""
    parser = argparse.ArgumentParser(description="Fit the A100's free numbers.")
    parser.add_argument("--data", type=Path, required=True, help="CSV of measured runs")
    machines = load_machines()
    vtrain = read_external(parser.parse_args().data, machines).of("vtrain")
    korthikanti = korthikanti_rows(machines.a100)
    chosen = fitted_models()
    numbers = fit(
        [row for row in korthikanti if row.fitted],
        [row for row in vtrain if row.model in chosen],
        machines,
    )
    for name, value in numbers.items():
        print(f"{name} = {value:.4f}")
    fitted = machines.with_a100(tables_of(numbers))
    groups = {
        "korthikanti, fitted": [row for row in korthikanti if row.fitted],
        "korthikanti, held out": [row for row in korthikanti if not row.fitted],
        "vtrain, fitted": [row for row in vtrain if row.model in chosen],
        "vtrain, held out": [row for row in vtrain if row.model not in chosen],
    }
    for name, rows in groups.items():
        cluster = fitted.a100_half_network if "vtrain" in name else fitted.a100
        moved = [replace(row, cluster=cluster) for row in rows]
        found = scores([Predicted(row, predict_s(row)) for row in moved])
        print(f"{name:24} {found.count:4} rows, mean {found.mean:.2%}, worst {found.worst:+.1%}")


if __name__ == "__main__":
    main()
