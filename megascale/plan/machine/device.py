"""One device: its peaks, its memory, and the curves that say how much of them is reached."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from megascale.plan.machine.attention import AttentionCurve, attention_bytes, attention_flops
from megascale.plan.machine.gemm import GemmCurve, gemm_bytes
from megascale.plan.machine.passes import MemoryCurve
from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import Attention, Gemm, MemoryPass


class Device(Sourced):
    """Peaks are the data sheet's; what is reached of them is in `gemm`, `attention`, `memory`."""

    name: str = Field(description="as its driver names it")
    peak_tflops: float = Field(ge=0.001, le=20_000.0, description="dense bf16")
    num_sms: int = Field(ge=1, le=2_000)
    memory_gb: float = Field(ge=0.5, le=4_096.0, description="GiB that a program can allocate")
    memory_gb_s: float = Field(ge=1.0, le=100_000.0, description="1e9 bytes a second")
    reserve: float = Field(
        0.06, ge=0.0, lt=0.9, description="share of memory kept for the allocator and NCCL"
    )
    launch_s: float = Field(ge=0.0, le=1e-3, description="host time of one kernel's launch")
    restart_s: float = Field(
        0.0, ge=0.0, le=1e-2, description="from the end of a host's wait to a busy device"
    )
    gemm: GemmCurve
    attention: AttentionCurve
    memory: MemoryCurve

    @model_validator(mode="after")
    def _shares_are_shares(self) -> Self:
        for word, share in self.memory.shares.items():
            if not 0.0 < share <= 1.0:
                raise ValueError(f"memory.shares.{word} is {share}; legal: above 0, at most 1")
        return self

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 2.0**30

    @property
    def bytes_per_s(self) -> float:
        """The peak."""
        return self.memory_gb_s * 1e9

    @property
    def reached_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.memory.share

    def peak_flops(self, dtype_bytes: int = 2) -> float:
        """FLOP/s in a type of this width: half the rate at twice the width."""
        return self.peak_tflops * 1e12 * 2.0 / max(2, dtype_bytes)

    def place(self, operation: Gemm | Attention) -> tuple[float, ...]:
        """Coordinates in which a correction by samples is smooth."""
        if isinstance(operation, Attention):
            return self.attention.coordinates(operation)
        peak_flops = self.peak_flops(operation.dtype_bytes)
        return self.gemm.coordinates(operation, peak_flops, self.reached_bytes_per_s)

    def matrix_s(self, operation: Gemm | Attention, *, in_step: bool = False) -> float:
        """Of the tensor cores alone, by the curves; `in_step`: at the rate that they sustain."""
        if isinstance(operation, Attention):
            return self.attention.matrix_s(operation, self.peak_flops())
        return self.gemm.matrix_s(
            operation,
            self.peak_flops(operation.dtype_bytes),
            self.reached_bytes_per_s,
            self.num_sms,
            self.gemm.sustained if in_step else 1.0,
        )

    def traffic_s(self, operation: Gemm | Attention) -> float:
        """Of memory alone."""
        if isinstance(operation, Gemm):
            return gemm_bytes(operation) / self.reached_bytes_per_s
        return attention_bytes(operation) / self.reached_bytes_per_s

    def seconds(self, operation: Gemm | Attention | MemoryPass, correction: float = 1.0) -> float:
        """By the curves; `correction` multiplies the time of the tensor cores."""
        if isinstance(operation, MemoryPass):
            return self.memory.pass_s(operation, self.bytes_per_s)
        curve = self.gemm if isinstance(operation, Gemm) else self.attention
        matrix_s = correction * self.matrix_s(operation, in_step=True)
        return curve.floor_s + max(matrix_s, self.traffic_s(operation))

    def roofline_s(self, operation: Gemm | Attention | MemoryPass) -> float:
        """No device of these peaks is faster."""
        if isinstance(operation, Gemm):
            peak = self.peak_flops(operation.dtype_bytes)
            return max(operation.flops / peak, gemm_bytes(operation) / self.bytes_per_s)
        if isinstance(operation, Attention):
            least_s = attention_bytes(operation) / self.bytes_per_s
            return max(attention_flops(operation) / self.peak_flops(), least_s)
        return operation.num_bytes / self.bytes_per_s
