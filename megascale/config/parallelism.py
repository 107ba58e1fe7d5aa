"""`[parallelism]` and `[activation_checkpoint]`: how the model is spread, what is recomputed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megascale.config.base import Section

_ONE_CHUNK_A_STAGE = ("1f1b", "gpipe", "zb_h1")
_MOST_STAGES_OF_A_HEAD = 4  # plan/schedules/shared_head.py
_IN_GROUPS_OF_STAGES = ("interleaved_1f1b", "interleaved_zb")


class ParallelismConfig(Section):
    """Degrees of 3D parallelism (MegaScale 2); sequence parallelism always goes with tensor."""

    layout: Literal["given", "auto"] = Field(
        "given",
        description="given: the degrees below; auto: the planner chooses them for the ranks of the "
        "run, and schedule, ZeRO stage, micro-batch and recomputation with them",
    )
    cluster: str = Field(
        "",
        description="with layout auto and in dry runs: a cluster file, or h200, h100, a100, paper; "
        "empty: by the device's name; on a CPU nothing is priced",
    )
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    virtual_pipeline_size: int = Field(1, ge=1, description="model chunks a stage")
    data_parallel_size: int = Field(-1, description="-1: what the world size leaves")
    zero_stage: Literal[1, 2] = Field(
        1, description="1: optimizer state sharded over data ranks; 2: gradients too"
    )
    pipeline_schedule: Literal[
        "auto", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb"
    ] = Field(
        "auto",
        description="auto: 1f1b, interleaved where there are chunks; zb: zero-bubble, backward in "
        "two halves (2401.10241)",
    )
    pipeline_transfers: Literal["decoupled", "coupled"] = Field(
        "decoupled", description="sends and receives on their own (MegaScale 3.2), or paired"
    )
    join_weight_gradients: int = Field(
        1,
        ge=1,
        description="micro-batches whose weight gradients are one GEMM: fewer passes over the fp32 "
        "gradients, for the operands of so many micro-batches a chunk kept",
    )
    share_head: bool = Field(
        False,
        description="the output head's vocabulary is split over stages too, so that the last one "
        "has no more work than the others (2411.05288); interleaved schedules",
    )
    flux: Literal["auto", "fused", "chunked", "reference"] = Field(
        "auto",
        description="form of the tensor-parallel operators; auto: the fastest that machine and "
        "layout allow",
    )
    flux_reserve_sms: int = Field(
        0,
        ge=0,
        description="SMs that fused operators leave to NCCL: with pipeline or data parallelism, "
        "as many as its kernels have thread blocks at a time",
    )
    bucket_mb: float = Field(
        200.0, gt=0.0, description="data-parallel communication unit: layers joined up to this"
    )
    overlap_grad_reduce: bool = Field(
        True,
        description="a bucket's gradients are reduced under the backward below it; false: after "
        "all of backward (ZeRO-2: after the bucket's, and waited for)",
    )
    overlap_param_gather: bool = Field(
        True,
        description="a bucket's parameters are gathered under the optimizer, data loading and the "
        "next forward; false: all after the optimizer, and waited for",
    )
    grad_reduce_dtype: Literal["main", "bfloat16"] = Field(
        "main",
        description="what gradients travel in. bfloat16: half the bytes, summed in the main dtype",
    )

    @model_validator(mode="after")
    def _degrees_agree(self) -> ParallelismConfig:
        if self.data_parallel_size == 0 or self.data_parallel_size < -1:
            raise ValueError(
                f"parallelism.data_parallel_size is {self.data_parallel_size}; "
                "legal: a positive number, or -1 for what the world size leaves"
            )
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"parallelism.virtual_pipeline_size is {self.virtual_pipeline_size} without a "
                "pipeline; set parallelism.pipeline_parallel_size above 1, or virtual to 1"
            )
        if self.virtual_pipeline_size > 1 and self.pipeline_schedule in _ONE_CHUNK_A_STAGE:
            raise ValueError(
                f"parallelism.pipeline_schedule {self.pipeline_schedule!r} runs one chunk a stage, "
                f"got virtual_pipeline_size {self.virtual_pipeline_size}; "
                "use 'interleaved_1f1b', 'interleaved_zb' or 'auto'"
            )
        self._check_shared_head()
        return self

    def _check_shared_head(self) -> None:
        if not self.share_head:
            return
        if self.pipeline_parallel_size == 1:
            raise ValueError(
                "parallelism.share_head is true without a pipeline, whose stages would share it; "
                "set parallelism.pipeline_parallel_size above 1, or share_head to false"
            )
        if self.pipeline_parallel_size > _MOST_STAGES_OF_A_HEAD:
            raise ValueError(
                f"parallelism.share_head is true with {self.pipeline_parallel_size} stages; up to "
                f"{_MOST_STAGES_OF_A_HEAD} can share it, more would block each other; set "
                "share_head to false"
            )
        if self.pipeline_transfers == "coupled":
            raise ValueError(
                "parallelism.share_head is true with coupled transfers, which would wait for a "
                "stage that waits for the head; set parallelism.pipeline_transfers to 'decoupled'"
            )
        if not self.needs_whole_groups or self.virtual_pipeline_size == 1:
            raise ValueError(
                f"parallelism.share_head needs an interleaved schedule, got {self.schedule!r} with "
                f"virtual_pipeline_size {self.virtual_pipeline_size}: with one chunk a stage the "
                "stages would wait for each other; set virtual_pipeline_size to 2 or more, or "
                "share_head to false"
            )

    @property
    def schedule(self) -> str:
        """The schedule's name with "auto" resolved: interleaved where there are chunks."""
        if self.pipeline_schedule != "auto":
            return self.pipeline_schedule
        return "interleaved_1f1b" if self.virtual_pipeline_size > 1 else "1f1b"

    @property
    def needs_whole_groups(self) -> bool:
        """Micro-batches have to come in multiples of the stages."""
        return self.schedule in _IN_GROUPS_OF_STAGES

    @property
    def num_chunks(self) -> int:
        """Model chunks over the whole pipeline."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    @property
    def model_parallel_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ActivationCheckpointConfig(Section):
    """Recomputation: none; selective (attention core and activation); full (each layer)."""

    mode: Literal["none", "selective", "full"] = "none"
