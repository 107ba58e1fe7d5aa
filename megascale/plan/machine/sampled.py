"""Prices of a device of which samples were measured: its curves, drawn through the samples.

A product or an attention core is the parametric price times a correction (`surface.py`) from the
samples of the same direction; a pass over memory follows the line of the samples whose name its own
contains. Where a file has no samples of a kind, the parametric price stands.
"""

from __future__ import annotations

from collections.abc import Iterable

from megascale.plan.machine.attention import SLOPE
from megascale.plan.machine.device import Device
from megascale.plan.machine.passes import word_in
from megascale.plan.machine.samples import AttentionSample, GemmSample, Samples
from megascale.plan.machine.surface import Line, Surface
from megascale.plan.work.operations import Attention, Direction, Gemm, MemoryPass


class SampledDevice:
    """`seconds` of an operation on `device`, with `samples` of it (or none)."""

    def __init__(self, device: Device, samples: Samples | None) -> None:
        samples = samples or Samples(device=device.name)
        self._device = device
        self._gemms = {
            direction: surface
            for direction in Direction
            if (surface := self._gemm_surface(samples.gemm, direction)) is not None
        }
        self._attentions = {
            (backward, windowed): surface
            for backward in (False, True)
            for windowed in (False, True)
            if (surface := self._attention_surface(samples.attention, backward, windowed))
        }
        names = {sample.name for sample in samples.memory}
        self._passes = {
            name: Line(
                [(s.num_bytes, s.seconds) for s in samples.memory if s.name == name],
                device.memory.floor_s,
            )
            for name in names
        }

    def seconds(self, operation: Gemm | Attention | MemoryPass) -> float:
        """Never less than the roofline."""
        return max(self._device.roofline_s(operation), self._seconds(operation))

    def _seconds(self, operation: Gemm | Attention | MemoryPass) -> float:
        if isinstance(operation, MemoryPass):
            return self._pass_s(operation)
        if isinstance(operation, Gemm):
            surface = self._gemms.get(operation.direction)
        else:
            windowed = operation.window is not None and operation.window < operation.seq_len
            surface = self._attentions.get((operation.backward, windowed))
        if surface is None:
            return self._device.seconds(operation)
        return self._device.seconds(operation, surface.factor(self._device.place(operation)))

    def _pass_s(self, memory_pass: MemoryPass) -> float:
        """A sample is a whole pass, of one kernel or two; further ones cost their floor."""
        word = word_in(memory_pass.name, self._passes)
        if word is None or memory_pass.kernels == 0:
            return self._device.seconds(memory_pass)
        further_s = max(0, memory_pass.kernels - 2) * self._device.memory.floor_s
        return self._passes[word].seconds(memory_pass.num_bytes) + further_s

    def _gemm_surface(self, samples: Iterable[GemmSample], direction: Direction) -> Surface | None:
        operations = [
            (Gemm("", s.rows, s.columns, s.depth, s.direction), s.seconds)
            for s in samples
            if s.direction is direction
        ]
        return self._surface(operations, self._device.gemm.floor_s, self._device.gemm.slope)

    def _attention_surface(
        self, samples: Iterable[AttentionSample], backward: bool, windowed: bool
    ) -> Surface | None:
        """A window has kernels of its own; without samples of it the parametric price stands."""
        operations = [
            (attention_of(s), s.seconds)
            for s in samples
            if s.backward == backward and (s.window is not None) == windowed
        ]
        return self._surface(operations, self._device.attention.floor_s, SLOPE)

    def _surface(
        self, samples: Iterable[tuple[Gemm | Attention, float]], floor_s: float, slope: float
    ) -> Surface | None:
        """Of measured to parametric time, where tensor cores tell and not memory."""
        places: list[tuple[float, ...]] = []
        factors: list[float] = []
        for operation, seconds in samples:
            matrix_s = self._device.matrix_s(operation)
            if matrix_s < self._device.traffic_s(operation) or seconds <= 2 * floor_s:
                continue
            places.append(self._device.place(operation))
            factors.append((seconds - floor_s) / matrix_s)
        return Surface(places, factors, slope) if places else None


def attention_of(sample: AttentionSample) -> Attention:
    """The operation that a sample is of."""
    return Attention(
        "",
        sample.sequences,
        sample.seq_len,
        sample.heads,
        sample.kv_heads,
        sample.head_dim,
        sample.window,
        sample.backward,
    )
