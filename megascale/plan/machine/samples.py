"""What `megascale calibrate` measures, as rows. A cluster file keeps them beside what was fitted on
them; `sampled.py` and `transfers.py` turn both into prices.

All times are seconds of one device, the median of repeated calls, values checked before timing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megascale.plan.work.operations import Direction, Transfer


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GemmSample(_Row):
    """One matrix product, sizes as in `work.operations.Gemm`."""

    rows: int = Field(ge=1)
    columns: int = Field(ge=1)
    depth: int = Field(ge=1)
    direction: Direction
    seconds: float = Field(gt=0.0)


class AttentionSample(_Row):
    """One attention core, sizes as in `work.operations.Attention`."""

    sequences: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    window: int | None = None
    backward: bool
    seconds: float = Field(gt=0.0)


class MemorySample(_Row):
    """A pass over memory: bytes read plus bytes written. `name`: norm, activation, copy, adamw."""

    name: str
    num_bytes: float = Field(gt=0.0)
    seconds: float = Field(gt=0.0)


class CollectiveSample(_Row):
    """One transfer; `num_bytes` as in `work.operations.Collective`.

    link  "nvlink" inside a node, "network" between nodes, "copy_engine" between peers without SMs,
    "host" between device and pinned host memory
    """

    transfer: Transfer
    ranks: int = Field(ge=1)
    num_bytes: float = Field(gt=0.0)
    link: Literal["nvlink", "network", "copy_engine", "host"]
    seconds: float = Field(gt=0.0)


class OverlapSample(_Row):
    """Compute and transfer side by side: how much each is slowed (1.0: not at all)."""

    compute: Literal["gemm", "attention", "memory"]
    transfer: str
    compute_slow_down: float = Field(gt=0.0)
    transfer_slow_down: float = Field(gt=0.0)


class Samples(_Row):
    """Everything measured on one kind of machine."""

    device: str
    source: str = Field("measured", description="where and how")
    versions: dict[str, str] = {}
    gemm: tuple[GemmSample, ...] = ()
    attention: tuple[AttentionSample, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    collective: tuple[CollectiveSample, ...] = ()
    overlap: tuple[OverlapSample, ...] = ()
    launch_s: float = Field(0.0, ge=0.0, description="host time of one kernel's launch")
    sustained: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="rate of products that run for seconds on end to that of `gemm` (power limit)",
    )
