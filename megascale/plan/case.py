"""What the planner prices: a job, how it is laid out, and what the program does. Plain data.

`Job` is what is trained, `Layout` how it is spread (MegaScale 2), `Software` what the program does
with its communication and its operators (MegaScale 3). Every technique of the paper is a field of
one of the three, and each changes FLOPs, bytes or the action list: none is a factor on a time.

A `Case` is hashable and cheap, so that a search makes ten thousands of them; `RunConfig` is its
form for people. `case_of` and `overrides_of` go from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale.config import ModelConfig, ParallelismConfig, RunConfig
from megascale.plan.actions import PipelineShape
from megascale.topology import Mesh

Recompute = Literal["none", "attention", "selective", "full"]
"""attention: of scores in memory alone (2205.05198); selective: the MLP's activation too."""

TensorOverlap = Literal["none", "backward", "chunked", "fused"]


@dataclass(frozen=True)
class Job:
    """What is trained. Block and window (MegaScale 3.1) are fields of the model.

    global_batch_size  sequences an optimizer step
    seq_len            tokens a sequence
    """

    model: ModelConfig
    global_batch_size: int
    seq_len: int
    optimizer: Literal["adamw", "lamb"] = "adamw"
    dtype_bytes: int = 2

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True)
class Layout:
    """How a job is spread over `tensor * data * pipeline` devices.

    virtual    chunks a stage
    schedule   a name of `plan.schedules.SCHEDULES`
    zero_stage 0: nothing sharded (all-reduce); 1: optimizer; 2: gradients too; 3: parameters too
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    micro_batch_size: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 1
    recompute: Recompute = "none"
    schedule: str = "1f1b"
    share_head: bool = False
    join_weight_gradients: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def num_chunks(self) -> int:
        return self.pipeline * self.virtual

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.tensor, self.data, self.pipeline)


@dataclass(frozen=True)
class Software:
    """What the program does; the defaults are megascale's own.

    sequence_parallel     norms on split sequences, AG and RS; False: all-reduces (2104.04473)
    tensor_overlap        TP collectives: none hides; backward: those that are independent of a
                          GEMM hide beside it (Megatron-LM at 285068c8, our reference form);
                          chunked: also inside their GEMMs, cut in chunks (MegaScale 3.2); fused:
                          in tiles (Flux)
    copy_engines          chunks travel by copies between peers of a node, own rows first (ours), or
                          False: by the collective library, all ranks' rows of a chunk at once
    transfers             pipeline sends and receives decoupled, or paired (MegaScale 3.2)
    synchronises          the host waits for the device after each paired exchange (Megatron-LM)
    overlap_grad_reduce   DP reduce-scatter under the backward below
    overlap_param_gather  DP all-gather under the forward above
    grad_reduce_bytes     of a gradient on the wire
    bucket_mb             of fp32 gradients in a data-parallel bucket; infinite: a chunk at once
    operators             "fused": one pass a norm or activation; "plain": a kernel an operation
    attention             "flash", or "scores": the s x s matrix goes through memory
    keeps_masks           of dropout (Megatron-LM); False: they are functions of counters
    host_ahead            launch and data of the next step hide; False: paid each step (misc)
    """

    sequence_parallel: bool = True
    tensor_overlap: TensorOverlap = "fused"
    copy_engines: bool = True
    transfers: Literal["decoupled", "coupled"] = "decoupled"
    synchronises: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    grad_reduce_bytes: int = 4
    bucket_mb: float = 200.0
    operators: Literal["fused", "plain"] = "fused"
    attention: Literal["flash", "scores"] = "flash"
    keeps_masks: bool = False
    host_ahead: bool = True


@dataclass(frozen=True)
class Case:
    """One job, one layout, one program: what `price` prices."""

    job: Job
    layout: Layout
    software: Software = Software()

    @property
    def micro_batches(self) -> int:
        """Micro-batches a pipeline runs a step; the layout divides the batch (`legal` checks)."""
        unit = self.layout.micro_batch_size * self.layout.data
        assert self.job.global_batch_size % unit == 0, (self.job.global_batch_size, unit)
        return self.job.global_batch_size // unit

    @property
    def micro_batch_tokens(self) -> int:
        return self.layout.micro_batch_size * self.job.seq_len

    @property
    def shape(self) -> PipelineShape:
        return PipelineShape(self.layout.pipeline, self.layout.virtual, self.micro_batches)


def case_of(config: RunConfig, world_size: int) -> Case:
    """The case of a run's configuration on `world_size` ranks. Raises ConfigError where illegal."""
    par, training = config.parallelism, config.training
    mesh = config.mesh(world_size)
    return Case(
        job=Job(
            model=config.model,
            global_batch_size=training.global_batch_size,
            seq_len=training.seq_len,
            optimizer=config.optimizer.name,
            dtype_bytes={"bfloat16": 2, "float32": 4, "float64": 8}[training.dtype],
        ),
        layout=Layout(
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            virtual=par.virtual_pipeline_size,
            data=mesh.data,
            micro_batch_size=training.micro_batch_size,
            zero_stage=par.zero_stage,
            recompute=config.activation_checkpoint.mode,
            schedule=par.schedule,
            share_head=par.share_head,
            join_weight_gradients=par.join_weight_gradients,
        ),
        software=Software(
            tensor_overlap=tensor_overlap_of(par, mesh),
            transfers=par.pipeline_transfers,
            synchronises=par.pipeline_transfers == "coupled",
            overlap_grad_reduce=par.overlap_grad_reduce,
            overlap_param_gather=par.overlap_param_gather,
            grad_reduce_bytes=2 if par.grad_reduce_dtype == "bfloat16" else 4,
            bucket_mb=par.bucket_mb,
            operators=config.operators.mode,
            host_ahead=training.run_ahead,
        ),
    )


def tensor_overlap_of(par: ParallelismConfig, mesh: Mesh) -> TensorOverlap:
    """The form that the trainer takes (`flux/mode.py`): where NCCL transfers may be pending beside
    a kernel that fills the GPU and waits, chunks take the fused form's place."""
    if par.flux == "reference":
        return "backward"
    beside = mesh.pipeline > 1 or mesh.data > 1
    if par.flux == "chunked" or (par.flux == "auto" and beside and par.flux_reserve_sms == 0):
        return "chunked"
    return "fused"


def overrides_of(layout: Layout) -> list[str]:
    """The `--set` arguments that give a run this layout."""
    return [
        f"parallelism.tensor_parallel_size={layout.tensor}",
        f"parallelism.pipeline_parallel_size={layout.pipeline}",
        f"parallelism.virtual_pipeline_size={layout.virtual}",
        f"parallelism.data_parallel_size={layout.data}",
        f"parallelism.zero_stage={layout.zero_stage}",
        f"parallelism.pipeline_schedule={layout.schedule}",
        f"parallelism.share_head={str(layout.share_head).lower()}",
        f"parallelism.join_weight_gradients={layout.join_weight_gradients}",
        f"activation_checkpoint.mode={layout.recompute}",
        f"training.micro_batch_size={layout.micro_batch_size}",
    ]
