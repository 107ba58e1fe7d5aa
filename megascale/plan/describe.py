"""What a configuration means on a number of ranks, before anything starts (`train --dry-run`).

Groups, layers over stages, parameters in total and a rank, memory a rank. Building a description
runs every check that starting the run would: degrees, batches, layers, the schedule's proof.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megascale.config import RunConfig
from megascale.errors import ConfigError
from megascale.plan.check import StageBounds, check_schedule
from megascale.plan.memory import RankMemory, predict_memory, stage_chunks
from megascale.plan.parameters import count_by_component, model_parameters
from megascale.plan.schedules import build_schedule
from megascale.plan.stages import split_layers
from megascale.topology import AXES, Mesh
from megascale.units import format_bytes, format_count

_SHOWN_GROUPS = 4


@dataclass(frozen=True)
class StageDescription:
    """One pipeline stage; the ranks of a stage are alike."""

    stage: int
    chunks: dict[int, range]
    rank_parameters: int
    memory: RankMemory
    bounds: StageBounds


@dataclass(frozen=True)
class Description:
    """A run on `mesh`; `str()` is the report, `to_dict()` its JSON twin."""

    mesh: Mesh
    schedule: str
    transfers: str
    micro_batches: int
    shared_head: bool
    parameters: dict[str, int]
    stages: list[StageDescription]

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    def __str__(self) -> str:
        return "\n".join([*self._group_lines(), *self._model_lines(), *self._stage_lines()])

    def _group_lines(self) -> list[str]:
        lines = [f"{self.mesh.world_size} ranks"]
        for axis in AXES:
            groups = self.mesh.groups(axis)
            shown = " ".join(_ranks(ranks) for ranks in groups[:_SHOWN_GROUPS])
            more = f" ... {len(groups)} groups" if len(groups) > _SHOWN_GROUPS else ""
            lines.append(f"  {axis} parallel {getattr(self.mesh, axis)}: {shown}{more}")
        return lines

    def _model_lines(self) -> list[str]:
        shares = ", ".join(f"{name} {format_count(n)}" for name, n in self.parameters.items())
        steps = f"{self.micro_batches} micro-batches a step"
        if self.shared_head:
            steps += f", head shared by {self.mesh.pipeline} stages"
        return [
            f"parameters {self.total_parameters:,} ({shares})",
            f"schedule {self.schedule}, {self.transfers} transfers, {steps}",
        ]

    def _stage_lines(self) -> list[str]:
        memory = [field.name for field in fields(RankMemory)]
        titles = [name.removesuffix("_bytes").replace("_", " ") for name in memory]
        rows = [["stage", "layers", "parameters", "in flight", *titles, "total"]]
        for stage in self.stages:
            sizes = [getattr(stage.memory, name) for name in memory]
            rows.append(
                [
                    str(stage.stage),
                    " ".join(_layers(layers) for layers in stage.chunks.values()),
                    format_count(stage.rank_parameters),
                    str(stage.bounds.in_flight),
                    *map(format_bytes, [*sizes, stage.memory.total_bytes]),
                ]
            )
        return ["each rank, by stage (memory predicted):", *_table(rows)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.mesh.world_size,
            "groups": {axis: self.mesh.groups(axis) for axis in AXES},
            "schedule": self.schedule,
            "transfers": self.transfers,
            "micro_batches": self.micro_batches,
            "shared_head": self.shared_head,
            "parameters": {"total": self.total_parameters, **self.parameters},
            "stages": [
                {
                    "stage": stage.stage,
                    "layers": {c: [r.start, r.stop] for c, r in stage.chunks.items()},
                    "rank_parameters": stage.rank_parameters,
                    "in_flight": stage.bounds.in_flight,
                    "memory_bytes": {
                        **{f.name: getattr(stage.memory, f.name) for f in fields(RankMemory)},
                        "total_bytes": stage.memory.total_bytes,
                    },
                }
                for stage in self.stages
            ],
        }


def describe(config: RunConfig, world_size: int) -> Description:
    """The description of `config` on `world_size` ranks. Raises ConfigError where it is illegal."""
    par, model = config.parallelism, config.model
    if model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not known; set it, or give data.path so that it is taken from "
            "the tokenizer"
        )
    mesh = config.mesh(world_size)
    count = config.micro_batches(config.training.global_batch_size, mesh.data)
    schedule = build_schedule(
        par.schedule,
        stages=par.pipeline_parallel_size,
        chunks_per_stage=par.virtual_pipeline_size,
        micro_batches=count,
        transfers=par.pipeline_transfers,
        shared_head=par.share_head,
        split_backward=par.join_weight_gradients > 1,
    )
    bounds = check_schedule(schedule)
    layers = split_layers(model.num_layers, par.num_chunks)
    stages = [
        StageDescription(
            stage=stage,
            chunks={chunk: layers[chunk] for chunk in schedule.shape.chunks_of(stage)},
            rank_parameters=sum(
                parameter.local_elements(mesh.tensor)
                for chunk in stage_chunks(config, stage)
                for parameter in chunk
            ),
            memory=predict_memory(config, mesh, stage),
            bounds=bounds[stage],
        )
        for stage in range(mesh.pipeline)
    ]
    return Description(
        mesh=mesh,
        schedule=par.schedule,
        transfers=par.pipeline_transfers,
        micro_batches=count,
        shared_head=par.share_head,
        parameters=count_by_component(model_parameters(model, config.learned_positions)),
        stages=stages,
    )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 4:
        return f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"
    return str(ranks)


def _layers(layers: range) -> str:
    return str(layers.start) if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
