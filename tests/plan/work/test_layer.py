"""A layer's operations: FLOPs as the formula counts them, collectives as the paper does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megascale.config import ModelConfig
from megascale.plan.work.ends import head_work_of
from megascale.plan.work.layer import LayerWork, layer_work_of
from megascale.plan.work.operations import (
    Attention,
    Collective,
    Direction,
    Gemm,
    MemoryPass,
    Transfer,
    Work,
)
from megascale.plan.work.shape import RankShape
from megascale.units import flops_per_token, matmul_parameters

GPT: dict[str, Any] = {
    "hidden_size": 512,
    "num_layers": 3,
    "num_heads": 8,
    "vocab_size": 1024,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "bias": "all",
}
LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden_size": 1536,
    "vocab_size": 1024,
}
MODELS = {
    "gpt": ModelConfig(**GPT),
    "parallel": ModelConfig(**GPT, block="parallel"),
    "window": ModelConfig(**GPT, attention_window=48),
    "llama": ModelConfig(**LLAMA),
    "parallel llama": ModelConfig(**LLAMA, block="parallel"),
    "wide heads": ModelConfig(**{**LLAMA, "head_dim": 128}),
}


def shape_of(model: ModelConfig, **changes: Any) -> RankShape:
    values: dict[str, Any] = {"tensor": 2, "micro_batch_size": 3, "seq_len": 256, **changes}
    return RankShape(model=model, **values)


def flops(*works: Work) -> float:
    return sum(op.flops for work in works for op in work if isinstance(op, Gemm | Attention))


def all_of(work: LayerWork) -> tuple[Work, ...]:
    return work.forward, work.recompute, work.backward_input, work.backward_weight


def collectives(work: Work) -> Counter[Transfer]:
    return Counter(op.transfer for op in work if isinstance(op, Collective))


@pytest.mark.parametrize("one_pair", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_flops_of_all_layers_and_the_head_are_those_of_the_formula(
    name: str, tensor: int, one_pair: bool
) -> None:
    model = MODELS[name]
    shape = shape_of(model, tensor=tensor, one_pair=one_pair)
    layers = model.num_layers * flops(*all_of(layer_work_of(shape)))
    head = flops(*all_of(head_work_of(shape, tensor)))
    assert tensor * (layers + head) == shape.tokens * flops_per_token(model, shape.seq_len)


def test_scores_in_memory_have_the_same_flops() -> None:
    model = MODELS["gpt"]
    for recompute in ("none", "full"):
        flash, scores = (
            flops(*all_of(layer_work_of(shape_of(model, recompute=recompute, scores=s))))
            for s in (False, True)
        )
        assert flash == scores


def test_full_recomputation_is_the_hardware_flops_of_the_literature() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh): 2104.04473, equation 3."""
    model = MODELS["gpt"]
    shape = shape_of(model, recompute="full")
    h, s, layers, vocab = 512, 256, model.num_layers, 1024
    work = layers * flops(*all_of(layer_work_of(shape))) + flops(*all_of(head_work_of(shape, 2)))
    assert 2 * work == pytest.approx(
        96 * 3 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h)), rel=1e-12
    )


def test_the_attention_core_alone_is_recomputed() -> None:
    """4 B s^2 h a layer again (2205.05198), with or without the activation."""
    model = MODELS["gpt"]
    again = 4 * 3 * 256**2 * 512 / 2
    for recompute in ("attention", "selective"):
        work = layer_work_of(shape_of(model, recompute=recompute, scores=True))
        assert flops(work.recompute) == again
    selective = layer_work_of(shape_of(model, recompute="selective")).recompute
    assert selective == (MemoryPass("activation", 2 * 3 * 256 * 1024 * 2.0),)


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        # serial: two gathers and two reductions each way, and the inputs gathered again
        ({}, {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
        ({"sequence_parallel": False}, {"all_reduce": 2}, {"all_reduce": 2}),
        ({"tensor": 1}, {}, {}),
    ],
)
def test_collectives_of_a_serial_layer(
    changes: dict[str, Any], forward: dict[str, int], backward: dict[str, int]
) -> None:
    work = layer_work_of(shape_of(MODELS["gpt"], **changes))
    assert collectives(work.forward) == Counter({Transfer(k): n for k, n in forward.items()})
    assert collectives(work.backward_input) == Counter(
        {Transfer(k): n for k, n in backward.items()}
    )
    assert not collectives(work.backward_weight)


def test_a_parallel_block_gathers_and_reduces_once() -> None:
    """MegaScale 3.1: one all-gather in and one reduce-scatter out in place of two each."""
    work = layer_work_of(shape_of(MODELS["parallel"]))
    assert collectives(work.forward) == {Transfer.ALL_GATHER: 1, Transfer.REDUCE_SCATTER: 1}
    assert collectives(work.backward_input) == {Transfer.ALL_GATHER: 2, Transfer.REDUCE_SCATTER: 1}
    whole = layer_work_of(shape_of(MODELS["parallel"], sequence_parallel=False))
    assert collectives(whole.forward) == {Transfer.ALL_REDUCE: 1}
    norms = [op for op in work.forward if isinstance(op, MemoryPass) and op.name == "norm"]
    assert len(norms) == 1


def test_every_collective_moves_the_hidden_states_of_all_tokens() -> None:
    for model in MODELS.values():
        work = layer_work_of(shape_of(model, tensor=4))
        sizes = {op.num_bytes for part in all_of(work) for op in part if isinstance(op, Collective)}
        assert sizes == {3 * 256 * 512 * 2}


def test_what_a_collective_may_hide_behind() -> None:
    """`flux/autograd.py`: inputs gathered again under the input gradient, reductions under the
    weights'; where weights are a half of their own they gather for themselves."""
    whole = layer_work_of(shape_of(MODELS["gpt"]))
    found = {op.name: (op.under, op.beside) for op in whole.forward if isinstance(op, Collective)}
    assert found == {
        "qkv.gather": ("qkv", None),
        "o.reduce": ("o", None),
        "fc1.gather": ("fc1", None),
        "fc2.reduce": ("fc2", None),
    }
    back = {
        op.name: (op.under, op.beside) for op in whole.backward_input if isinstance(op, Collective)
    }
    assert back["fc1.dgrad.reduce"] == ("fc1.dgrad", "fc1.wgrad")
    assert back["fc1.wgrad.gather"] == (None, "fc1.dgrad")
    assert back["fc2.dgrad.gather"] == ("fc2.dgrad", None)
    split = layer_work_of(shape_of(MODELS["gpt"], halves="split"))
    assert collectives(split.backward_input) == {
        Transfer.ALL_GATHER: 2,
        Transfer.REDUCE_SCATTER: 2,
    }
    again = {op.name: op.beside for op in split.backward_weight if isinstance(op, Collective)}
    assert again == {f"{name}.wgrad.gather": f"{name}.wgrad" for name in ("qkv", "o", "fc1", "fc2")}


def test_joined_weight_gradients_are_one_product_over_all_their_tokens() -> None:
    """And what they gathered is copied: each of four operands read and written."""
    joined = layer_work_of(shape_of(MODELS["gpt"], halves="joined", joined=4))
    depths = {op.depth for op in joined.backward_weight if isinstance(op, Gemm)}
    assert depths == {4 * 3 * 256}
    copies = [op for op in joined.backward_input if op.name == "copy"]
    assert copies == [MemoryPass("copy", 2 * 3 * 256 * 512 * 2.0)] * 4


def test_products_by_hand() -> None:
    """Llama, two tensor ranks: q 256, k and v 128 each; gate and up 768 each."""
    work = layer_work_of(shape_of(MODELS["llama"]))
    tokens, forward = 3 * 256, Direction.FORWARD
    assert [op for op in work.forward if isinstance(op, Gemm)] == [
        Gemm("qkv", tokens, 512, 512, forward),
        Gemm("o", tokens, 512, 256, forward),
        Gemm("fc1", tokens, 1536, 512, forward),
        Gemm("fc2", tokens, 512, 768, forward),
    ]
    assert [op for op in work.backward_weight if isinstance(op, Gemm)] == [
        Gemm("fc2.wgrad", 512, 768, tokens, Direction.WGRAD),
        Gemm("fc1.wgrad", 1536, 512, tokens, Direction.WGRAD),
        Gemm("o.wgrad", 512, 256, tokens, Direction.WGRAD),
        Gemm("qkv.wgrad", 512, 512, tokens, Direction.WGRAD),
    ]
    attention = next(op for op in work.forward if isinstance(op, Attention))
    assert (attention.sequences, attention.heads, attention.kv_heads) == (3, 4, 2)


def test_a_parallel_block_s_products_by_hand() -> None:
    """One in; out as one kernel, or as two of which the second adds to the first."""
    tokens = 3 * 256
    pair = layer_work_of(shape_of(MODELS["parallel"], one_pair=True))
    assert [op for op in pair.forward if isinstance(op, Gemm)] == [
        Gemm("in", tokens, 768 + 1024, 512, Direction.FORWARD),
        Gemm("fc2", tokens, 512, 256 + 1024, Direction.FORWARD),
    ]
    two = layer_work_of(shape_of(MODELS["parallel"]))
    assert [op.depth for op in two.forward if isinstance(op, Gemm)] == [512, 256, 1024]
    assert MemoryPass("add", tokens * 512 * 2.0, kernels=0) in two.forward


def passes(work: Work) -> dict[str, float]:
    """Bytes of memory passes by name."""
    found: Counter[str] = Counter()
    for op in work:
        if isinstance(op, MemoryPass):
            found[op.name] += op.num_bytes  # type: ignore[assignment]
    return dict(found)


def test_bytes_of_fused_passes_by_hand() -> None:
    """Own rows of 512 columns (o), all rows of 1024 (f), 768 (q, k, v) and 512, 2 bytes each."""
    o, f, qkv, whole = 384 * 512 * 2, 768 * 1024 * 2, 768 * 768 * 2, 768 * 512 * 2
    work = layer_work_of(shape_of(MODELS["gpt"]))
    assert passes(work.forward) == {"norm": 2 * 4 * o, "activation": 2 * f}
    assert passes(work.backward_input) == {
        "norm_backward": 2 * 4 * o,
        "activation_backward": 3 * f,
        "heads_backward": 2 * qkv,
    }
    assert passes(work.backward_weight) == {"column_sum": 2 * o + qkv}  # fc1's is on the way
    whole_rows = layer_work_of(shape_of(MODELS["gpt"], sequence_parallel=False))
    assert passes(whole_rows.forward)["norm"] == 2 * 4 * whole
    kept_sum = layer_work_of(shape_of(MODELS["gpt"], recompute="full"))
    assert passes(kept_sum.forward) == {"norm": 6 * o, "add": 3 * o, "activation": 2 * f}


def test_plain_operators_move_more() -> None:
    """Norms 2 with sums of 3 before them; backward 5 and 3; fc1's bias gradient read once more."""
    o, f, qkv = 384 * 512 * 2, 768 * 1024 * 2, 768 * 768 * 2
    work = layer_work_of(shape_of(MODELS["gpt"], plain=True))
    assert passes(work.forward) == {"norm": 4 * o, "add": 6 * o, "activation": 2 * f}
    assert passes(work.backward_input)["norm_backward"] == 10 * o
    assert passes(work.backward_input)["add"] == 6 * o
    assert passes(work.backward_weight) == {"column_sum": 2 * o + qkv + f}
    llama = shape_of(MODELS["llama"])
    a = 768 * 768 * 2
    assert passes(layer_work_of(llama).forward)["activation"] == 3 * a
    assert passes(layer_work_of(replace(llama, plain=True)).forward)["activation"] == 5 * a
    assert passes(layer_work_of(llama).backward_input)["activation_backward"] == 5 * a


def test_dropout_has_a_pass_each_way_and_masks_only_where_they_are_kept() -> None:
    model = ModelConfig(**GPT, hidden_dropout=0.1)
    o = 384 * 512 * 2
    assert passes(layer_work_of(shape_of(model)).forward)["dropout"] == 2 * 2 * o
    assert passes(layer_work_of(shape_of(model)).backward_input)["dropout_backward"] == 4 * o
    kept = passes(layer_work_of(shape_of(model, masks=True)).forward)
    assert kept["dropout"] == 2 * (2 * o + o / 2)


def test_scores_pass_through_memory() -> None:
    """4 heads of 256 x 256 in 3 sequences; the softmax reads what the mask leaves of them."""
    scores = 3 * 4 * 256 * 256 * 2
    work = layer_work_of(shape_of(MODELS["gpt"], scores=True))
    assert passes(work.forward)["scores_softmax"] == 1.5 * scores
    assert passes(work.backward_input)["scores_softmax_backward"] == 2 * scores
    assert not [op for part in all_of(work) for op in part if isinstance(op, Attention)]
    dropped = ModelConfig(**GPT, attention_dropout=0.1)
    work = layer_work_of(shape_of(dropped, scores=True))
    assert passes(work.forward)["scores_dropout"] == 2.5 * scores


def test_rotary_positions_cost_a_pass_over_q_k_and_v() -> None:
    qkv = 768 * 512 * 2
    assert passes(layer_work_of(shape_of(MODELS["llama"])).forward)["heads"] == 2 * qkv
    assert "heads" not in passes(layer_work_of(shape_of(MODELS["gpt"])).forward)


def test_the_head_s_weights_are_all_that_is_multiplied_beside_the_layers() -> None:
    model = MODELS["llama"]
    layers = 6 * (matmul_parameters(model) - model.vocab * model.hidden_size)
    work = layer_work_of(shape_of(model))
    gemms = sum(op.flops for part in all_of(work) for op in part if isinstance(op, Gemm))
    assert 2 * model.num_layers * gemms == 3 * 256 * layers
