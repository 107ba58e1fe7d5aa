"""A small residual network cut into chunks and units, wrapped as training wraps its own.

Sizes divide by nothing: a layer's matrix is cut in the middle by data ranks, the last unit has
fewer elements than there are ranks, and one matrix is used by two units of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megascale.model.layers import FusedLinear, Norm
from megascale.parallel.buckets import plan_buckets
from megascale.parallel.groups import Groups
from megascale.parallel.spans import Span, no_span
from megascale.parallel.tensor import TensorParallel, linear_operators, shard_chunk
from megascale.parallel.zero import ShardedDataParallel
from megascale.shards import Placement

WIDTH, OUT = 13, 3
CHUNKS: list[tuple[range, bool]] = [(range(2), False), (range(2, 4), True)]
TABLE = [("*", Placement.REPLICATED)]


class Layer(nn.Module):
    """x + tanh(linear(norm(x)))"""

    def __init__(self, number: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        name = f"layers.{number}"
        self.norm = Norm(f"{name}.norm", "rmsnorm", WIDTH, 1e-5, device, dtype)
        blocks = ((f"{name}.a", 5), (f"{name}.b", WIDTH - 5))
        self.linear = FusedLinear(WIDTH, blocks, True, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x, None, "fused")[1]))


class Toy(nn.Module):
    """Layers; with `last`, the first layer's matrix again, a head of 3 outputs and its gain."""

    def __init__(
        self, layers: range, *, last: bool, device: str = "meta", dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        place = torch.device(device)
        self.layers = nn.ModuleDict({str(n): Layer(n, place, dtype) for n in layers})
        self.last = last
        self.before_unit: Callable[[str, Tensor], Tensor] = lambda _name, x: x
        if last:
            first = self.layers[str(layers[0])]
            assert isinstance(first, Layer)
            self.again = FusedLinear(WIDTH, first.linear.blocks, False, place, dtype)
            self.again.weight = first.linear.weight
            self.head = FusedLinear(WIDTH, (("head", OUT),), False, place, dtype)
            self.gain = Norm("gain", "rmsnorm", OUT, 1e-5, place, dtype)

    def forward(self, x: Tensor) -> Tensor:
        for name, (path,) in self.units():
            unit, x = self.get_submodule(path), self.before_unit(name, x)
            x = unit(x, None, "fused")[1] if isinstance(unit, Norm) else unit(x)
        return x

    def units(self) -> list[tuple[str, list[str]]]:
        names = [f"layers.{number}" for number in self.layers]
        names += ["again", "head", "gain"] if self.last else []
        return [(name, [name]) for name in names]


def toys(device: str = "meta", dtype: torch.dtype = torch.float64) -> list[Toy]:
    return [Toy(layers, last=last, device=device, dtype=dtype) for layers, last in CHUNKS]


def parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter by chunk number and path."""
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield f"{number}.{name}", parameter


@torch.no_grad()
def fill(chunks: Sequence[nn.Module]) -> None:
    """Seeded values, whatever holds them."""
    generator = torch.Generator().manual_seed(3)
    for _, parameter in parameters(chunks):
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(0.5 * values)


def engine(
    chunks: Sequence[Toy],
    groups: Groups,
    *,
    zero_stage: int,
    bucket_bytes: float,
    dtype: torch.dtype = torch.float64,
    span: Span = no_span,
    **options: bool,
) -> ShardedDataParallel:
    """The data parallel over `chunks`, which it fills, and watches; `options` are its own."""
    main_dtype = torch.promote_types(dtype, torch.float32)
    tp = TensorParallel(None, 0, 1)
    sharded = [
        (
            [name for name, _ in chunk.units()],
            shard_chunk(chunk, TABLE, chunk.units(), tp, operators=linear_operators(tp)),
        )
        for chunk in chunks
    ]
    buckets = plan_buckets(
        sharded,
        bucket_bytes=bucket_bytes,
        main_itemsize=main_dtype.itemsize,
        num_data_ranks=groups.mesh.data,
        data_rank=groups.coordinates.dp_rank,
    )
    zero = ShardedDataParallel(
        buckets,
        groups,
        zero_stage=zero_stage,
        device=torch.device("cpu"),
        dtype=dtype,
        main_dtype=main_dtype,
        span=span,
        **options,
    )
    fill(chunks)
    for bucket in buckets:
        bucket.master.copy_(bucket.parameters[bucket.shard_start : bucket.shard_stop])
    for index, chunk in enumerate(chunks):
        _watch(chunk, index, zero)
    return zero


def _watch(chunk: Toy, index: int, zero: ShardedDataParallel) -> None:
    numbers = {name: number for number, (name, _) in enumerate(chunk.units())}
    chunk.before_unit = lambda name, x: zero.boundary(index, numbers[name], x)
