"""The file that says which faults, on whom, when; and the jobs that it takes.

    seed = 1

    [job]                       # what is run; the recipe is given on the command line
    nodes = 2
    procs_per_node = 2
    spares = 1
    set = ["data.synthetic=true"]
    duration_s = 3600           # absent: until the last fault is over
    step_s = 0.5                # computation of a step, slept with noise; absent: its own alone

    [[fault]]
    kind = "kill"               # or any_of = ["kill", "sigstop"]: one of them, by the seed
    rank = 1                    # absent: one by the seed; the same with `node` (a node rank)
    at_step = 20                # or at_s = 600, by the clock of chaos since the first step;
    times = 3                   # absent: as soon as the one before is over
    every_s = 600
    options = {seconds = 0.2}   # of the kind (`faults.py`)
    set = []                    # more overrides, for this one

Faults share a job, but for those that end it, those that need namespaces or other settings. What is
chosen by the seed depends on the fault's place in the file alone, so that a schedule is the same
everywhere and a fault can be tried again by itself.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megascale.cluster.chaos.faults import KINDS, kind_named
from megascale.cluster.chaos.inject import Target
from megascale.config.base import Section
from megascale.config.value_types import check_type
from megascale.errors import ConfigError


class Table(Section):
    """Of the file. Lists and tables are pydantic's to check, single values are the section's."""

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "validates fields"
        field = cls.model_fields[info.field_name]
        if get_origin(field.annotation) not in (list, dict):
            check_type(value, field)
        return value


class JobSection(Table):
    nodes: int = Field(2, ge=1, description="that train")
    procs_per_node: int = Field(2, ge=1)
    spares: int = Field(1, ge=0)
    set: list[str] = Field([], description="overrides of the recipe")
    duration_s: float | None = Field(None, gt=0.0, description="then the job is stopped")
    step_s: float | None = Field(
        None, gt=0.0, description="computation of a step: sleeps, with the noise of noise.json"
    )
    first_step: int = Field(6, ge=1, description="before it no fault comes")
    gap_steps: int = Field(6, ge=1, description="new steps between two faults")
    within_s: float = Field(120.0, gt=0.0, description="a fault that is not over then is a miss")


class FaultSection(Table):
    kind: str = ""
    any_of: list[str] = Field([])
    rank: int | None = Field(None, ge=0)
    node: int | None = Field(None, ge=0, description="node rank")
    at_step: int | None = Field(None, ge=1)
    at_s: float | None = Field(None, ge=0.0)
    every_s: float | None = Field(None, gt=0.0)
    times: int = Field(1, ge=1)
    within_s: float | None = Field(None, gt=0.0)
    options: dict[str, float] = Field({})
    set: list[str] = Field([], description="more overrides; it has a job of its own then")

    @property
    def kinds(self) -> list[str]:
        return self.any_of or [self.kind]

    @model_validator(mode="after")
    def _is_possible(self) -> FaultSection:
        if bool(self.kind) == bool(self.any_of):
            raise ValueError("give either kind or any_of; " + ", ".join(KINDS))
        for name in self.kinds:
            kind = _known(name)
            unknown = sorted(set(self.options) - set(kind.options))
            if unknown:
                legal = ", ".join(kind.options) or "none"
                raise ValueError(f"{name} has no option {unknown[0]!r}; legal: {legal}")
            for given, aims in ((self.rank, "rank"), (self.node, "node")):
                if given is not None and kind.aims != aims:
                    raise ValueError(f"{name} is aimed at a {kind.aims}, so {aims} is not legal")
        if self.at_step is not None and self.at_s is not None:
            raise ValueError("at_step and at_s exclude each other; give one of them or neither")
        if self.every_s is not None and (self.at_s is None or self.times < 2):
            raise ValueError("every_s needs at_s, when the first one comes, and times")
        if self.at_step is not None and self.times > 1:
            raise ValueError("at_step is one moment; with times leave it out, or give at_s")
        return self


class ScheduleFile(Table):
    seed: int = 0
    job: JobSection = JobSection()
    fault: list[FaultSection] = Field(min_length=1)

    @model_validator(mode="after")
    def _targets_are_there(self) -> ScheduleFile:
        ranks = self.job.nodes * self.job.procs_per_node
        for number, fault in enumerate(self.fault, 1):
            if fault.rank is not None and fault.rank >= ranks:
                raise ValueError(f"fault {number}: rank {fault.rank} of {ranks}; 0 is the first")
            if fault.node is not None and fault.node >= self.job.nodes:
                raise ValueError(f"fault {number}: node {fault.node} of {self.job.nodes}")
            if self.job.spares < 1 and {"spare_kill", "bad_spare"} & {*fault.kinds}:
                raise ValueError(f"fault {number} needs a spare: job.spares is 0")
        return self


@dataclass(frozen=True)
class Planned:
    """One fault that will be done. number: counts all of the schedule, from 1."""

    number: int
    kind: str
    target: Target
    at_step: int | None = None
    at_s: float | None = None
    within_s: float = 120.0
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobPlan:
    """Faults that one job has, in the order in which they come."""

    faults: tuple[Planned, ...]
    overrides: tuple[str, ...] = ()
    namespaces: bool = False


@dataclass(frozen=True)
class Schedule:
    name: str
    job: JobSection
    jobs: tuple[JobPlan, ...] = field(default=())
    seed: int = 0


def load_schedule(path: Path) -> Schedule:
    """Raises ConfigError with every problem, one a line."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no schedule: {error}") from None
    try:
        file = ScheduleFile.model_validate(content)
    except ValidationError as error:
        lines = [f"{path}: {_place(p['loc'])}{_said(p['msg'])}" for p in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    return Schedule(path.stem, file.job, tuple(group(plan(file), file.job.set)), file.seed)


def plan(file: ScheduleFile) -> list[Planned]:
    """Every fault with its target; what the file leaves open is chosen by its seed."""
    found: list[Planned] = []
    for place, section in enumerate(file.fault):
        for time in range(section.times):
            rng = random.Random(f"{file.seed}/{place}/{time}")
            name = rng.choice(section.kinds)
            kind = KINDS[name]
            ranks = file.job.nodes * file.job.procs_per_node
            rank, node = rng.randrange(ranks), rng.randrange(file.job.nodes)
            target = Target(
                rank=(rank if section.rank is None else section.rank)
                if kind.aims == "rank"
                else None,
                node=(node if section.node is None else section.node)
                if kind.aims == "node"
                else None,
                options={**kind.options, **section.options},
                seed=f"{file.seed}/{place}/{time}",
            )
            at_s = section.at_s
            if at_s is not None and section.every_s is not None:
                at_s += time * section.every_s
            within_s = section.within_s or file.job.within_s
            found.append(
                Planned(
                    len(found) + 1,
                    name,
                    target,
                    section.at_step,
                    at_s,
                    within_s,
                    tuple(section.set),
                )
            )
    return found


def group(faults: Sequence[Planned], common: Sequence[str]) -> list[JobPlan]:
    """Jobs of faults that can follow each other, in the order of their first."""
    shared: dict[tuple[Any, ...], list[Planned]] = {}
    for fault in faults:
        kind = KINDS[fault.kind]
        alone = fault.number if kind.alone or kind.outcome == "stop" else 0
        key = (alone, (*kind.overrides, *fault.overrides), "namespaces" in kind.needs)
        shared.setdefault(key, []).append(fault)
    plans = []
    for (_, overrides, namespaces), members in shared.items():
        timed = [one for one in members if one.at_s is not None]
        others = [one for one in members if one.at_s is None]
        timed.sort(key=lambda one: one.at_s or 0.0)
        plans.append(JobPlan((*others, *timed), (*common, *overrides), namespaces))
    return plans


def _known(name: str) -> Any:
    try:
        return kind_named(name)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _place(loc: Sequence[Any]) -> str:
    words = [str(part + 1) if isinstance(part, int) else str(part) for part in loc]
    return ".".join(words) + ": " if words else ""


def _said(message: str) -> str:
    return message.removeprefix("Value error, ")
