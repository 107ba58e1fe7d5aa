"""Sharded linear operators against one device in fp64, and what a chunk may not be cut into."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.model.sharding import sharding_table
from megascale.model.transformer import TransformerChunk
from megascale.parallel.tensor import (
    Operators,
    StoredParameter,
    TensorParallel,
    linear_operators,
    padded_vocab_rows,
    shard_chunk,
)
from megascale.shards import Placement
from tests.distributed import run_ranks

TOKENS, IN_A, IN_B, OUT = 8, 12, 20, 24  # 4 ranks divide all
TOLERANCE = 1e-12  # relative, fp64: the sums differ in order alone
CASES = [
    (kind, bias, into_main_grad)
    for kind in ("column", "row", "pair")
    for bias in (False, True)
    for into_main_grad in (False, True)
]
Case = tuple[str, bool, bool]
Named = dict[str, NDArray[np.float64]]
PASSES = 2  # on the same buffers: gradients add up


def _inputs(kind: str, bias: bool) -> dict[str, Tensor]:
    """Whole tensors of a case: what goes in, and the gradient that comes back."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"x": (TOKENS, IN_A), "weight": (OUT, IN_A)}
    if kind == "pair":
        shapes |= {"b": (TOKENS, IN_B), "weight_b": (OUT, IN_B)}
    if bias:
        shapes["bias"] = (OUT,)
    shapes["grad_y"] = (TOKENS, OUT)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in shapes.items()
    }


# Which axis of each tensor tensor parallelism cuts; those not named are whole on every rank.
CUTS: dict[str, dict[str, int]] = {
    "column": {"x": 0, "weight": 0, "bias": 0, "grad_y": 1, "y": 1},
    "row": {"x": 1, "weight": 1, "grad_y": 0, "y": 0},
    "pair": {"x": 1, "weight": 1, "b": 1, "weight_b": 1, "grad_y": 0, "y": 0},
}


def _reference(kind: str, bias: bool) -> Named:
    values = _inputs(kind, bias)
    grad_y = values.pop("grad_y")
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    y = F.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    if kind == "pair":
        y = y + F.linear(leaves["b"], leaves["weight_b"])
    y.backward(grad_y)
    found = {"y": y.detach().numpy()}
    return found | {f"grad_{k}": v.grad.numpy() for k, v in leaves.items() if v.grad is not None}


def _apply(kind: str, operators: Operators, leaves: dict[str, Tensor]) -> Tensor:
    bias = leaves.get("bias")
    if kind == "pair":
        pair = operators["pair", Placement.ROW]
        return pair(leaves["x"], leaves["weight"], leaves["b"], leaves["weight_b"], bias)
    placement = Placement.COLUMN if kind == "column" else Placement.ROW
    return operators["linear", placement](leaves["x"], leaves["weight"], bias)


def _run_case(case: Case, tp: TensorParallel) -> Named:
    kind, bias, into_main_grad = case
    values = {
        name: value.chunk(tp.size, CUTS[kind][name])[tp.rank].contiguous()
        if name in CUTS[kind]
        else value
        for name, value in _inputs(kind, bias).items()
    }
    grad_y = values.pop("grad_y")
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    weights = [name for name in leaves if name not in ("x", "b")]
    if into_main_grad:
        for name in weights:
            leaves[name].main_grad = torch.zeros_like(leaves[name])  # type: ignore[attr-defined]
    y = torch.empty(0)
    for _ in range(PASSES):
        y = _apply(kind, linear_operators(tp), leaves)
        y.backward(grad_y)
    found = {"y": y.detach().numpy()}
    for name, leaf in leaves.items():
        if into_main_grad and name in weights:
            assert leaf.grad is None, name
            gradient = leaf.main_grad  # type: ignore[attr-defined]
        else:
            gradient = leaf.grad
        found[f"grad_{name}"] = gradient.numpy()
    return found


def _run(rank: int, world_size: int) -> dict[Case, Named]:
    tp = TensorParallel(dist.group.WORLD, rank, world_size)
    return {case: _run_case(case, tp) for case in CASES}


def _join(kind: str, name: str, parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The whole tensor of its parts; what every rank holds whole is partial and summed."""
    axis = CUTS[kind].get(name.removeprefix("grad_"))
    return np.sum(parts, axis=0) if axis is None else np.concatenate(parts, axis)


def _check(by_rank: list[dict[Case, Named]]) -> None:
    for case in CASES:
        kind, bias, _ = case
        for name, expected in _reference(kind, bias).items():
            got = _join(kind, name, [found[case][name] for found in by_rank])
            expected = expected * (PASSES if name.startswith("grad_") else 1)
            assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max(), (case, name)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_linears_equal_one_device(num_ranks: int) -> None:
    _check(run_ranks(_run, num_ranks))


def test_one_rank_needs_no_group() -> None:
    tp = TensorParallel(None, 0, 1)
    _check([{case: _run_case(case, tp) for case in CASES}])


# ---------------------------------------------------------------- cutting a chunk


def _chunk(**changes: object) -> tuple[ModelConfig, TransformerChunk]:
    shape = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 100,
    }
    cfg = ModelConfig(**{**shape, "ffn_hidden_size": 48, **changes})
    layers = range(cfg.num_layers)
    return cfg, TransformerChunk(
        cfg, layers, embed=True, head=True, num_positions=16, device="meta"
    )


def _shard(
    cfg: ModelConfig,
    chunk: TransformerChunk,
    rank: int,
    size: int,
    table: list[tuple[str, Placement]] | None = None,
) -> list[StoredParameter]:
    tp = TensorParallel(None, rank, size)
    table = sharding_table(cfg) if table is None else table
    return shard_chunk(chunk, table, chunk.units(), tp, operators=linear_operators(tp))


Boxes = dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]


def _boxes(stored: list[StoredParameter]) -> Boxes:
    """By logical name: offset and shape of what this rank holds, and where in its tensor."""
    return {b.name: (b.box.offset, b.box.shape, b.start) for s in stored for b in s.blocks}


def test_rank_1_of_2_holds_its_part_of_a_serial_chunk() -> None:
    cfg, chunk = _chunk(bias="all", norm="layernorm")
    boxes = _boxes(_shard(cfg, chunk, 1, 2))
    layer = {k.removeprefix("layers.1."): v for k, v in boxes.items() if k.startswith("layers.1.")}
    assert layer == {
        "norm1.weight": ((0,), (32,), 0),
        "norm1.bias": ((0,), (32,), 0),
        "attn.q.weight": ((16, 0), (16, 32), 0),
        "attn.k.weight": ((8, 0), (8, 32), 16 * 32),
        "attn.v.weight": ((8, 0), (8, 32), 24 * 32),
        "attn.q.bias": ((16,), (16,), 0),
        "attn.k.bias": ((8,), (8,), 16),
        "attn.v.bias": ((8,), (8,), 24),
        "attn.o.weight": ((0, 16), (32, 16), 0),
        "attn.o.bias": ((0,), (32,), 0),
        "norm2.weight": ((0,), (32,), 0),
        "norm2.bias": ((0,), (32,), 0),
        "mlp.gate.weight": ((24, 0), (24, 32), 0),
        "mlp.up.weight": ((24, 0), (24, 32), 24 * 32),
        "mlp.gate.bias": ((24,), (24,), 0),
        "mlp.up.bias": ((24,), (24,), 24),
        "mlp.fc2.weight": ((0, 24), (32, 24), 0),
        "mlp.fc2.bias": ((0,), (32,), 0),
    }
    assert boxes["embed.tokens.weight"] == boxes["head.weight"] == ((64, 0), (36, 32), 0)
    shapes = {name: tuple(p.shape) for name, p in chunk.named_parameters()}
    assert shapes["layers.1.attn.qkv.weight"] == (32, 32)
    assert shapes["layers.1.mlp.fc1.bias"] == (48,)
    assert shapes["layers.1.attn.o.weight"] == (32, 16)
    assert shapes["head.weight"] == (64, 32)  # 36 rows of the vocabulary, and padding
    assert {p.device.type for p in chunk.parameters()} == {"meta"}


def test_rank_1_of_2_holds_its_part_of_a_parallel_chunk() -> None:
    cfg, chunk = _chunk(block="parallel", bias="all")
    boxes = _boxes(_shard(cfg, chunk, 1, 2))
    assert boxes["layers.0.attn.v.weight"] == ((8, 0), (8, 32), 24 * 32)
    assert boxes["layers.0.mlp.up.weight"] == ((24, 0), (24, 32), 56 * 32)
    assert boxes["layers.0.mlp.up.bias"] == ((24,), (24,), 56)
    assert boxes["layers.0.attn.o.weight"] == ((0, 16), (32, 16), 0)
    assert boxes["layers.0.mlp.fc2.weight"] == ((0, 24), (32, 24), 0)
    assert boxes["layers.0.mlp.fc2.bias"] == ((0,), (32,), 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_whole_on_every_rank_is_replicated_and_counted_once(rank: int) -> None:
    cfg, chunk = _chunk(bias="all", position="learned")
    stored = _shard(cfg, chunk, rank, 2)
    replicated = {b.name for s in stored for b in s.blocks if b.replicated}
    assert replicated == {
        *(f"layers.{n}.{name}" for n in (0, 1) for name in ("norm1.weight", "norm2.weight")),
        *(f"layers.{n}.{name}" for n in (0, 1) for name in ("attn.o.bias", "mlp.fc2.bias")),
        "embed.positions.weight",
        "final_norm.weight",
    }
    assert {b.counted for s in stored for b in s.blocks if b.replicated} == {rank == 0}
    alone = _shard(*_chunk(), 0, 1)
    assert not any(b.replicated or b.is_copy for s in alone for b in s.blocks)


def test_a_tied_head_is_stored_once_or_is_the_copy_of_another_stage() -> None:
    cfg, chunk = _chunk(tie_embeddings=True)
    stored = _shard(cfg, chunk, 0, 2)
    (table,) = (s for s in stored if s.path == "embed.tokens")
    assert table.units == ["embed", "head"]
    assert "head.weight" not in dict(chunk.named_parameters())
    assert chunk.head is not None
    assert chunk.head.weight is table.parameter
    last = TransformerChunk(cfg, [1], embed=False, head=True, num_positions=16, device="meta")
    tp = TensorParallel(None, 0, 2)
    for stage, tied_copy in ((chunk, False), (last, True)):
        stored = shard_chunk(
            stage,
            sharding_table(cfg),
            stage.units(),
            tp,
            operators={},
            tied="embed.tokens.weight",
            tied_copy=tied_copy,
        )
        tied = [block for s in stored for block in s.blocks if block.tied]
        assert [(b.name, b.tied_copy) for b in tied] == [("embed.tokens.weight", tied_copy)]


def test_operators_hang_where_kind_and_placement_agree() -> None:
    cfg, chunk = _chunk(block="parallel", position="learned")
    calls: list[str] = []

    def operator(name: str) -> Callable[..., Tensor]:
        def call(*_tensors: Tensor) -> Tensor:
            calls.append(name)
            return torch.empty(0)

        return call

    kinds = [("linear", Placement.COLUMN), ("pair", Placement.ROW), ("lookup", Placement.VOCAB)]
    shard_chunk(
        chunk,
        sharding_table(cfg),
        chunk.units(),
        TensorParallel(None, 0, 2),
        operators={kind: operator(kind[0]) for kind in kinds},
    )
    chunk.get_submodule("layers.0.in_proj")(torch.empty(0))
    chunk.get_submodule("layers.0.out_proj")(torch.empty(0), torch.empty(0))
    chunk.get_submodule("embed.tokens")(torch.empty(0))
    assert calls == ["linear", "pair", "lookup"]
    positions = chunk.get_submodule("embed.positions")  # a lookup that is replicated keeps its own
    assert positions.op is not chunk.get_submodule("embed.tokens").op


def test_a_module_without_a_row_is_refused() -> None:
    cfg, chunk = _chunk()
    table = [row for row in sharding_table(cfg) if row[0] != "layers.*.norm2"]
    with pytest.raises(ConfigError, match=r"'layers\.0\.norm2' has parameters but no row"):
        _shard(cfg, chunk, 0, 2, table)


@pytest.mark.parametrize(
    ("pattern", "placement", "message"),
    [
        ("layers.*.attn.qkv", Placement.COLUMN, r"layers\.0\.attn\.q\.weight has 32 rows"),
        ("layers.*.mlp.fc1", Placement.COLUMN, r"layers\.0\.mlp\.gate\.weight has 48 rows"),
        ("layers.*.mlp.fc2", Placement.ROW, r"layers\.0\.mlp\.fc2 has 48 columns"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    pattern: str, placement: Placement, message: str
) -> None:
    cfg, chunk = _chunk()
    message += ", which tensor_parallel_size 5 does not divide; choose a size that divides it"
    with pytest.raises(ConfigError, match=message):
        _shard(cfg, chunk, 0, 5, [(pattern, placement), ("*", Placement.REPLICATED)])


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "rows", "own"),
    [
        (50257, 4, 12608, [12608, 12608, 12608, 12433]),
        (64000, 4, 16000, [16000] * 4),  # divides: no padding
        (256, 4, 64, [64] * 4),
        (100, 4, 64, [64, 36, 0, 0]),  # fewer rows than ranks x 64: some hold padding alone
        (60, 2, 64, [60, 0]),
        (100, 1, 128, [100]),
    ],
)
def test_the_vocabulary_is_padded(vocab_size: int, tp_size: int, rows: int, own: list[int]) -> None:
    assert padded_vocab_rows(vocab_size, tp_size) == rows
    offset = 0
    for rank in range(tp_size):
        cfg, chunk = _chunk(vocab_size=vocab_size)
        stored = _shard(cfg, chunk, rank, tp_size)
        (table,) = (s for s in stored if s.path == "embed.tokens")
        (block,) = table.blocks
        assert tuple(table.parameter.shape) == (rows, 32)
        assert (block.box.offset, block.box.shape) == ((offset, 0), (own[rank], 32))
        assert block.global_shape == (vocab_size, 32)
        offset += own[rank]
    assert offset == vocab_size
