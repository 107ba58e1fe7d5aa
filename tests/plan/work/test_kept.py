"""What layers keep, against the formulas of Korthikanti et al. (2205.05198, section 4)."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.config import ModelConfig
from megascale.plan.work.kept import (
    backward_moment_bytes,
    deferred_bytes,
    forward_moment_bytes,
    kept_bytes,
)
from megascale.plan.work.shape import RankShape

H, A, S, B = 1024, 16, 512, 2
DROPPED = ModelConfig(
    hidden_size=H, num_layers=2, num_heads=A, vocab_size=1024, norm="layernorm",
    activation="gelu_tanh", position="learned", bias="all", hidden_dropout=0.1,
    attention_dropout=0.1,
)  # fmt: skip
STATISTICS = 2 * 2 * 4 * S * B  # of two norms, fp32


def shape(tensor: int = 1, **changes: Any) -> RankShape:
    values: dict[str, Any] = {"scores": True, "masks": True, **changes}
    return RankShape(DROPPED, tensor, B, S, **values)


def test_a_layer_of_megatron_keeps_34_sbh_and_its_scores() -> None:
    """s b h (34 + 5 a s / h)."""
    expected = S * B * H * (34 + 5 * A * S / H)
    assert kept_bytes(shape()) == expected + STATISTICS


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallelism_leaves_10_sbh_whole(tensor: int) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)); with sequence parallelism everything is divided."""
    whole = kept_bytes(shape(tensor, sequence_parallel=False))
    assert whole == S * B * H * (10 + 24 / tensor + 5 * A * S / (H * tensor)) + STATISTICS
    assert kept_bytes(shape(tensor)) == kept_bytes(shape()) / tensor


def test_recomputation_of_the_core_drops_the_scores_alone() -> None:
    log_sum_exp = 4 * A * S * B
    expected = 34 * S * B * H + STATISTICS + log_sum_exp
    assert kept_bytes(shape(recompute="attention")) == expected
    assert kept_bytes(shape(recompute="selective")) == expected - 2 * S * B * 4 * H
    assert kept_bytes(shape(recompute="full")) == 2 * S * B * H


def test_this_program_keeps_no_masks() -> None:
    ours = RankShape(DROPPED, 1, B, S)
    probabilities = (4 + 2) * A * S * S * B  # fp32, and dropped ones: attention dropout needs them
    assert kept_bytes(ours) == 32 * S * B * H + STATISTICS + probabilities


def test_what_a_layer_needs_for_a_moment_by_hand() -> None:
    """Two ranks, own rows o, all rows w, the MLP's width f of a rank; in bytes."""
    o, w, f = S * B * H, 2 * S * B * H, 2 * S * B * 2 * H
    reference = RankShape(DROPPED, 2, B, S)
    assert forward_moment_bytes(reference) == w + o
    assert backward_moment_bytes(reference) == o + w + f  # gathered gradient, and fc2's input's
    symmetric = RankShape(DROPPED, 2, B, S, symmetric=True)
    assert forward_moment_bytes(symmetric) == o
    assert backward_moment_bytes(symmetric) == o + f
    selective = RankShape(DROPPED, 2, B, S, symmetric=True, recompute="selective")
    assert backward_moment_bytes(selective) == o + 2 * f


def test_full_recomputation_makes_a_layer_again() -> None:
    full = RankShape(DROPPED, 2, B, S, symmetric=True, recompute="full")
    none = RankShape(DROPPED, 2, B, S, symmetric=True)
    again = kept_bytes(none) - S * B * H
    assert backward_moment_bytes(full) == backward_moment_bytes(none) + again


def test_joined_weight_gradients_keep_what_is_gathered_and_partial_sums() -> None:
    o, w = S * B * H, 2 * S * B * H
    columns = 2 * S * B * (H // 2 + 2 * H + 3 * H // 2 + 2 * H)  # o's, fc2's input; qkv's, fc1's
    norms = 4 * 2 * 2 * 132 * H
    biases = 4 * (2048 * 256) * 4
    split, joined = (
        deferred_bytes(RankShape(DROPPED, 2, B, S, halves=halves, joined=2))
        for halves in ("split", "joined")
    )
    assert split == 4 * o + columns + norms + biases
    assert joined == 4 * w + columns + norms + biases
