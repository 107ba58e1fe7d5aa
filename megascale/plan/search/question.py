"""What is asked of a search, made of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megascale.config import RunConfig
from megascale.errors import ConfigError
from megascale.plan.case import Case, Job, Layout, Software, case_of, tensor_overlap_of
from megascale.plan.memory import RankMemory, case_memory
from megascale.plan.search.space import Flags, Limits, Space


@dataclass(frozen=True)
class Question:
    """A job on a number of devices, whatever the cluster.

    config       that it is about; its layout is one of many here
    software     what the program does, but for the form of operators: `software_of`
    devices_per_node, most_devices  of the whole cluster, of which these devices are a part
    batch_sizes  every size of a batch that ramps up
    given        the recipe's own layout; `given_problem` says why it is none here
    """

    config: RunConfig
    job: Job
    num_devices: int
    software: Software
    devices_per_node: int
    most_devices: int
    batch_sizes: tuple[int, ...]
    given: Layout | None
    given_problem: str
    limits: Limits

    def software_of(self, layout: Layout) -> Software:
        """The form of tensor-parallel operators follows from the layout."""
        overlap = tensor_overlap_of(self.config.parallelism, layout.mesh)
        return replace(self.software, tensor_overlap=overlap)

    def case(self, layout: Layout) -> Case:
        return Case(self.job, layout, self.software_of(layout))

    def most_bytes(self, layout: Layout) -> int:
        """Memory on the fullest stage."""
        return max(memory.total_bytes for memory in stage_memory(self.case(layout)))

    def by_software(self, space: Space) -> Iterator[tuple[Flags, Space, Software]]:
        """Where the layouts of a software are, they, and it."""
        beside = (space.pipeline > 1) | (space.data > 1)
        for chosen in (beside, ~beside):
            if chosen.any():
                part = space.take(chosen)
                yield chosen, part, self.software_of(part.layout(0))

    def fits_software(self, space: Space) -> Space:
        """Without the layouts that the recipe's form of operators cannot run (`flux/mode.py`)."""
        par = self.config.parallelism
        if par.flux != "fused" or par.flux_reserve_sms > 0:
            return space
        beside = (space.pipeline > 1) | (space.data > 1)
        return space.take(~(beside & (space.tensor > 1)))


@lru_cache(maxsize=256)
def stage_memory(case: Case) -> tuple[RankMemory, ...]:
    """Memory of a rank of each stage, as a dry run tells it."""
    return tuple(case_memory(case, stage) for stage in range(case.layout.pipeline))


def question_of(
    config: RunConfig,
    num_devices: int,
    *,
    devices_per_node: int,
    most_devices: int,
    limits: Limits | None = None,
) -> Question:
    """What `config` asks for on so many devices. ConfigError where a search has no sense.

    limits  default: all that the trainer can, tensor parallelism inside a node
    """
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not known, and a plan opens no data to take it from; set it, such "
            "as --set model.vocab_size=32000"
        )
    par = config.parallelism
    single = case_of(configured(config, Layout()), 1)  # job and program are of no layout
    given, problem = _given(config, num_devices) if par.layout == "given" else (None, "")
    return Question(
        config=config,
        job=single.job,
        num_devices=num_devices,
        software=single.software,
        devices_per_node=devices_per_node,
        most_devices=most_devices,
        batch_sizes=tuple(config.training.batch_sizes()),
        given=given,
        given_problem=problem,
        limits=limits or Limits(max_tensor=devices_per_node),
    )


def configured(config: RunConfig, layout: Layout) -> RunConfig:
    """`config` with this layout. Nothing is checked: what is legal here was so before."""
    par = config.parallelism.model_copy(
        update={
            "layout": "given",
            "tensor_parallel_size": layout.tensor,
            "pipeline_parallel_size": layout.pipeline,
            "virtual_pipeline_size": layout.virtual,
            "data_parallel_size": layout.data,
            "zero_stage": layout.zero_stage,
            "pipeline_schedule": layout.schedule,
            "share_head": layout.share_head,
            "join_weight_gradients": layout.join_weight_gradients,
        }
    )
    recompute = config.activation_checkpoint.model_copy(update={"mode": layout.recompute})
    training = config.training.model_copy(
        update={"micro_batch_size": layout.micro_batch_size, "batch_ramp_up": None}
    )
    return config.model_copy(
        update={
            "parallelism": par,
            "activation_checkpoint": recompute,
            "training": training,
        }
    )


def _given(config: RunConfig, num_devices: int) -> tuple[Layout | None, str]:
    """The recipe's layout, or why there is none."""
    try:
        return case_of(config, num_devices).layout, ""
    except ConfigError as error:
        return None, str(error)
