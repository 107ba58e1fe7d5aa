"""Seconds of the pieces of a step, before they are put together.

`pricing.py` makes a `StepPrices` from a case and a cluster. Two readers put the pieces together:
`estimate.py` by a closed form, `simulate/` by running the very action lists that the trainer runs.
Both therefore agree on every piece, and differ only in how pieces meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spent:
    """Seconds of a device, by what they go to; they do not overlap, so the sum is the duration.

    tensor_s  tensor-parallel communication that nothing hides
    launch_s  the host could not launch fast enough
    """

    gemm_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    tensor_s: float = 0.0
    launch_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.gemm_s + self.attention_s + self.memory_s + self.tensor_s + self.launch_s

    def __add__(self, other: Spent) -> Spent:
        return Spent(  # spelt out: a search adds a hundred thousand of them
            self.gemm_s + other.gemm_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.tensor_s + other.tensor_s,
            self.launch_s + other.launch_s,
        )

    def times(self, factor: float) -> Spent:
        return Spent(
            factor * self.gemm_s,
            factor * self.attention_s,
            factor * self.memory_s,
            factor * self.tensor_s,
            factor * self.launch_s,
        )


def total(parts: Iterable[Spent]) -> Spent:
    """The sum of `parts`."""
    result = Spent()
    for part in parts:
        result += part
    return result


@dataclass(frozen=True)
class ChunkPrices:
    """One micro-batch through one model chunk. Embedding and head are in the chunks that hold them.

    recompute        of what backward needs again; runs at the start of the backward
    backward_input   and `backward_weight` together are the backward, else each a half of it
    """

    forward: Spent
    recompute: Spent
    backward_input: Spent
    backward_weight: Spent

    @property
    def backward(self) -> Spent:
        return self.recompute + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class DataPrices:
    """Data-parallel collectives of one stage, a bucket each, alone on the network.

    reduce_s[chunk][i], gather_s[chunk][i]  buckets of a chunk in the order in which its backward
    fills them (gather: in the order in which its forward needs them); empty without data
    parallelism. `bucket_layers` of the same shape: layers of the chunk that a bucket covers.
    slow_down     of compute beside them: 1.05 is 5 % slower while one runs
    """

    reduce_s: dict[int, tuple[float, ...]]
    gather_s: dict[int, tuple[float, ...]]
    bucket_layers: dict[int, tuple[float, ...]]
    slow_down: float = 1.0


@dataclass(frozen=True)
class StepPrices:
    """Everything that a step is made of; `chunks[c]` of model chunk c, `stages[s]` of stage s.

    head          of a shared head, one micro-batch, on every stage; None: in the last chunk
    transfer_s    one activation (or its gradient) to the next stage, by chunk it leaves
    transfer_slow_down  of compute while a transfer runs
    update_s      the optimizer's pass, by stage, with the norm's small all-reduces
    load_s        data loading and host work that precede the first launch, and are not hidden
    fixed_s       per step, whatever the layout: launch skew, logging; fitted where it is not zero
    embedding_s   all-reduce of tied embeddings' gradients between first and last stage
    """

    chunks: tuple[ChunkPrices, ...]
    head: ChunkPrices | None
    transfer_s: tuple[float, ...]
    transfer_slow_down: float
    data: tuple[DataPrices, ...]
    update_s: tuple[float, ...]
    load_s: float
    fixed_s: float
    embedding_s: float
