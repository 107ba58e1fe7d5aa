"""Every measured row predicted, in groups: what `megascale plan --validate` shows.

Predictions are the closed form's (`plan/estimate.py`); the simulator agrees with it within 0.3 % on
these rows (`megascale simulate --paper`). A group says whether a number was chosen with its rows in
view: "fitted", or "held out".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megascale.plan.case import Case
from megascale.plan.memory import case_memory
from megascale.plan.validate.choices import CHOSEN, SWEPT, Choices
from megascale.plan.validate.external import External, read_external
from megascale.plan.validate.fit import fitted_models
from megascale.plan.validate.machines import Machines, load_machines
from megascale.plan.validate.own import RESULTS, read_own
from megascale.plan.validate.published import (
    korthikanti_rows,
    narayanan_rows,
    table2_rows,
)
from megascale.plan.validate.replay import fixed_s_of, replay
from megascale.plan.validate.rows import Row
from megascale.plan.validate.scale import predict_s
from megascale.plan.validate.scores import Predicted

SLOWER_LINKS = {"nvlink": {"gb_s": 200.0}}
MICRO_BATCHES = (1, 2, 4, 8)  # among which Narayanan's rows take the fastest predicted


@dataclass(frozen=True)
class Group:
    """Rows of one set and system. `is_fitted`: with these rows in view a number was chosen."""

    name: str
    is_fitted: bool
    predicted: tuple[Predicted, ...]


@dataclass(frozen=True)
class MemoryCheck:
    """Peak memory of a row of ours, in GB: what the allocator gives out on the fullest rank."""

    row: Row
    predicted_gb: float

    @property
    def error(self) -> float:
        assert self.row.memory_gb is not None, self.row.label
        return self.predicted_gb / self.row.memory_gb - 1.0


@dataclass(frozen=True)
class Campaign:
    """All of it.

    fixed_s   the constant fitted on Table 2's Megatron-LM rows, for the chosen choices
    table3_slower_links  Table 3 where NVLink has 200 GB/s a direction, as an A800's, which the
              paper neither names nor excludes: what it says of the parallel block's gain
    swept     groups of Table 2 under other choices, each with the constant fitted again
    left_out  rows of the CSV that are no set of this validation, by reason
    """

    fixed_s: float
    groups: tuple[Group, ...]
    table3: tuple[Predicted, ...]
    table3_slower_links: tuple[Predicted, ...]
    memory: tuple[MemoryCheck, ...]
    swept: dict[str, tuple[Group, Group] | None]
    left_out: Counter[str] = field(default_factory=Counter)

    def group(self, name: str) -> Group | None:
        return next((group for group in self.groups if group.name == name), None)


def run_campaign(data: Path | None = None, results: Path = RESULTS) -> Campaign:
    """Predict everything. Raises ConfigError where `data` or `results` cannot be read.

    data     CSV of further measured runs
    results  folder of this project's own rows; none are predicted where it is not there
    """
    machines = load_machines()
    fixed_s = fixed_s_of(machines.paper, CHOSEN)
    own = read_own(results, machines.h200)
    external = read_external(data, machines) if data else External()
    groups = [
        *_korthikanti(machines),
        Group("narayanan", False, predict(_narayanan(machines))),
        *_table2(machines, CHOSEN),
        *_by_system("fig9", replay("fig9", machines.paper)),
        *_vtrain(external),
    ]
    if external.of("mosaicml"):
        groups.append(Group("mosaicml", False, predict(external.of("mosaicml"))))
    if own:
        groups.append(Group("own", False, predict(own)))
    return Campaign(
        fixed_s=fixed_s,
        groups=tuple(groups),
        table3=predict(replay("table3", machines.paper)),
        table3_slower_links=predict(replay("table3", machines.with_a100(SLOWER_LINKS).paper)),
        memory=tuple(
            MemoryCheck(row, peak_gb(row.case)) for row in own if row.memory_gb is not None
        ),
        swept={name: _swept(machines, choices) for name, choices in SWEPT.items()},
        left_out=external.left_out,
    )


def predict(rows: Sequence[Row]) -> tuple[Predicted, ...]:
    return tuple(Predicted(row, predict_s(row)) for row in rows)


def peak_gb(case: Case) -> float:
    """Of the fullest rank, as its allocator counts it."""
    stages = range(case.layout.pipeline)
    return max(case_memory(case, stage).allocator_bytes for stage in stages) / 1e9


def _korthikanti(machines: Machines) -> list[Group]:
    rows = korthikanti_rows(machines.a100)
    return [
        Group("korthikanti, fitted", True, predict([row for row in rows if row.fitted])),
        Group("korthikanti, held out", False, predict([row for row in rows if not row.fitted])),
    ]


def _narayanan(machines: Machines) -> list[Row]:
    """Each row with the micro-batch that is predicted to be the fastest, as the paper says that it
    took the best one and does not say which."""
    choices = [narayanan_rows(machines.a100, size) for size in MICRO_BATCHES]
    return [
        min((row for row in rows if _divides(row)), key=predict_s)
        for rows in zip(*choices, strict=True)
    ]


def _divides(row: Row) -> bool:
    """The batch holds whole micro-batches, at least one for each stage."""
    layout, batch = row.case.layout, row.case.job.global_batch_size
    unit = layout.micro_batch_size * layout.data
    return batch % unit == 0 and batch // unit >= layout.pipeline


def _table2(machines: Machines, choices: Choices) -> list[Group]:
    return _by_system("table2", replay("table2", machines.paper, choices))


def _by_system(name: str, rows: Sequence[Row]) -> list[Group]:
    systems = dict.fromkeys(row.system for row in rows)
    return [
        Group(f"{name}, {system}", of[0].fitted, predict(of))
        for system in systems
        if (of := [row for row in rows if row.system == system])
    ]


def _vtrain(external: External) -> list[Group]:
    rows, chosen = external.of("vtrain"), fitted_models()
    parts: dict[str, Callable[[Row], bool]] = {
        "vtrain, fitted": lambda row: row.model in chosen,
        "vtrain, held out": lambda row: row.model not in chosen,
    }
    return [
        Group(name, name.endswith("fitted"), predict(of))
        for name, belongs in parts.items()
        if (of := [replace(row, fitted=row.model in chosen) for row in rows if belongs(row)])
    ]


def _swept(machines: Machines, choices: Choices) -> tuple[Group, Group] | None:
    """Table 2 under other choices; None where they are illegal in one of its rows."""
    rows = table2_rows(machines.paper, choices)
    if not all(_is_legal(row) for row in rows):
        return None
    baseline, system = _table2(machines, choices)
    return baseline, system


def _is_legal(row: Row) -> bool:
    """Whole micro-batches, in multiples of the stages, as interleaving needs them."""
    layout = row.case.layout
    unit = layout.micro_batch_size * layout.data * layout.pipeline
    return row.case.job.global_batch_size % unit == 0
