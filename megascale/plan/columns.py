"""Layouts in columns: arrays of one entry each, and values that few columns tell apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megascale.plan.case import Case, Job, Layout, Recompute, Software

Floats = npt.NDArray[np.float64]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULE_NAMES = ("1f1b", "zb_h1", "interleaved_1f1b", "interleaved_zb")
"""What indices in columns mean where nobody says otherwise."""

LAYER = ("tensor", "micro_batch_size", "recompute", "schedule", "join_weight_gradients")
"""Columns that the work of a layer depends on; END: of embedding and head."""
END = ("tensor", "micro_batch_size", "schedule", "join_weight_gradients", "share_head", "pipeline")
CUT = ("tensor", "pipeline", "virtual", "data", "zero_stage", "share_head")
"""Columns that buckets and shards depend on."""


class LayoutColumns(Protocol):
    """Arrays of one entry a layout. `recompute` and `schedule` are indices of the names given."""

    @property
    def tensor(self) -> Any: ...
    @property
    def pipeline(self) -> Any: ...
    @property
    def virtual(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def micro_batch_size(self) -> Any: ...
    @property
    def micro_batches(self) -> Any: ...
    @property
    def zero_stage(self) -> Any: ...
    @property
    def recompute(self) -> Any: ...
    @property
    def schedule(self) -> Any: ...
    @property
    def share_head(self) -> Any: ...
    @property
    def join_weight_gradients(self) -> Any: ...


class Table:
    """The columns, and values that only a few of them tell apart."""

    def __init__(
        self,
        job: Job,
        software: Software,
        columns: LayoutColumns,
        recomputes: Sequence[Recompute] = RECOMPUTES,
        schedules: Sequence[str] = SCHEDULE_NAMES,
    ) -> None:
        self.job, self.software = job, software
        self._recomputes, self._schedules = recomputes, schedules
        names = [name for name in vars(LayoutColumns) if not name.startswith("_")]
        self._columns = {name: np.asarray(getattr(columns, name)) for name in names}

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        columns: dict[str, npt.NDArray[Any]] = self.__dict__["_columns"]
        return columns[name]

    def case(self, place: int) -> Case:
        row = {name: column[place].item() for name, column in self._columns.items()}
        del row["micro_batches"]
        row["recompute"] = self._recomputes[row["recompute"]]
        row["schedule"] = self._schedules[row["schedule"]]
        row["share_head"] = bool(row["share_head"])
        return Case(self.job, Layout(**row), self.software)

    def by(self, names: Sequence[str], value: Callable[[Case], Any]) -> Floats:
        """`value` of each layout, [..., layouts], computed once for each tuple of these columns."""
        key = np.zeros(len(self.tensor), np.int64)
        for name in names:
            column = self._columns[name].astype(np.int64)
            key = key * (column.max() + 1) + column
        _, places, which = np.unique(key, return_index=True, return_inverse=True)
        found = np.array([value(self.case(int(place))) for place in places], dtype=float)
        return np.moveaxis(found[which], 0, -1)
