"""Bytes that a layer keeps for its backward, and bytes that operators need for a moment.

Kept: Korthikanti et al. (2205.05198, section 4), with what this program does not keep left out:
scores (flash attention: one fp32 log-sum-exp a query) and dropout masks (functions of counters).
Software that keeps them says so. What lies *between* linears (norms, masks of hidden dropout) is
divided by the tensor ranks only with sequence parallelism; what lies *inside* (q, k, v, attention's
output, the MLP's width) always.

For a moment: what is alive beside the kept tensors while one operator runs; the most of it is what
a stage needs on top. H is the hidden states of all tokens, o the own rows, F the MLP's width:

| while | forward | backward (kept tensors go as soon as they were read) |
|---|---|---|
| fc2, o | the whole product H before its sum, the result o | the gradient o, gathered H, F |
| activation | | o, the result's gradient F and the input's; fc2's input is gone |
| fc1, qkv | gathered H | input and gradient gathered or whole, 2 H, and o; F is gone |

Fused and chunked forms gather into and reduce from symmetric buffers, so H is not allocated there.
"""

from __future__ import annotations

from functools import lru_cache

from megascale.config import ModelConfig
from megascale.plan.case import Recompute
from megascale.plan.work.shape import RankShape

_STATISTIC_BYTES = 4  # fp32


def kept_per_token(
    model: ModelConfig,
    recompute: Recompute,
    dtype_bytes: int,
    seq_len: int,
    *,
    scores: bool = False,
    masks: bool = False,
) -> tuple[int, int]:
    """(between, inside) of one layer and token, before division by tensor ranks.

    scores  probabilities are in memory; they always are with attention dropout
    masks   of dropout are kept, a byte an element
    """
    hidden, ffn = model.hidden_size, model.ffn_size
    if recompute == "full":
        return dtype_bytes * hidden, 0
    query, key = model.num_heads * model.dim_per_head, model.kv_heads * model.dim_per_head
    num_norms = 2 if model.block == "serial" else 1
    statistics = (2 if model.norm == "layernorm" else 1) * _STATISTIC_BYTES
    between = num_norms * (2 * hidden * dtype_bytes + statistics)  # a norm's input and output
    if masks and model.hidden_dropout > 0:
        between += num_norms * hidden
    elements = query + 2 * key  # q, k, v as attention reads them
    elements += query + key if model.qk_norm else 0  # q and k before their norms
    elements += query  # attention's output, the input of o
    elements += 2 * ffn if model.gated else ffn  # the activation's input
    if recompute != "selective":
        elements += ffn  # its output, the input of fc2
    inside = dtype_bytes * elements
    inside += _scores_per_token(model, recompute, dtype_bytes, seq_len, scores, masks)
    return between, inside


def _scores_per_token(
    model: ModelConfig,
    recompute: Recompute,
    dtype_bytes: int,
    seq_len: int,
    scores: bool,
    masks: bool,
) -> int:
    dropped = model.attention_dropout > 0
    if not (scores or dropped) or recompute != "none":
        return _STATISTIC_BYTES * model.num_heads  # log-sum-exp
    if not dropped:
        each = dtype_bytes
    elif masks:  # probabilities, their mask, what is left of them
        each = 2 * dtype_bytes + 1
    else:  # fp32 probabilities, and dropped ones
        each = _STATISTIC_BYTES + dtype_bytes
    return each * model.num_heads * seq_len


@lru_cache(maxsize=4096)
def kept_bytes(shape: RankShape, recompute: Recompute | None = None) -> float:
    """Of one layer and micro-batch on a rank. recompute: instead of the shape's own."""
    between, inside = kept_per_token(
        shape.model,
        shape.recompute if recompute is None else recompute,
        shape.dtype_bytes,
        shape.seq_len,
        scores=shape.scores,
        masks=shape.masks,
    )
    return between * shape.own_tokens + inside * shape.tokens / shape.tensor


@lru_cache(maxsize=4096)
def deferred_bytes(shape: RankShape) -> float:
    """Of a layer whose weight gradients wait: inputs and outputs' gradients of its linears, and
    where several micro-batches wait together, partial sums for biases and norms.

    Joined ones are kept gathered, others as the own rows.
    """
    model = shape.model
    num_norms = 2 if model.block == "serial" else 1
    joined = shape.halves == "joined"
    hidden = shape.hidden_bytes if joined else shape.own_hidden_bytes
    inside = shape.query + shape.ffn + shape.qkv + shape.ffn_in
    operands = 2 * num_norms * hidden + shape.column_bytes(inside)
    return operands + partial_sum_bytes(shape)


def partial_sum_bytes(shape: RankShape) -> float:
    """fp32 partial sums of norms' and biases' gradients (`ops/column_sum`, `ops/norm`)."""
    model = shape.model
    num_norms = 2 if model.block == "serial" else 1
    each = 2 if model.norm == "layernorm" else 1
    programs = min(NORM_PROGRAMS, shape.own_tokens)
    norms = num_norms * each * programs * model.hidden_size
    biases = 0
    if model.bias != "none":
        widths = [shape.qkv]
        if model.bias == "all":
            widths += [shape.ffn_in, *[model.hidden_size] * num_norms]
        biases = sum(min(SUM_PROGRAMS * SUM_COLUMNS, shape.tokens * width) for width in widths)
    return float(_STATISTIC_BYTES * (norms + biases))


NORM_PROGRAMS = 132  # `ops/norm/launch.py`
SUM_PROGRAMS, SUM_COLUMNS = 2048, 256  # `ops/column_sum/launch.py`


@lru_cache(maxsize=4096)
def forward_moment_bytes(shape: RankShape) -> float:
    """The most that a layer's forward needs beside what it keeps."""
    return _whole(shape) + shape.own_hidden_bytes


@lru_cache(maxsize=4096)
def backward_moment_bytes(shape: RankShape) -> float:
    """The most that a layer's backward needs beside what the forward kept of it."""
    own, whole = shape.own_hidden_bytes, _whole(shape)
    wide, result = shape.column_bytes(shape.ffn_in), shape.column_bytes(shape.ffn)
    again = result if shape.recompute == "selective" else 0.0
    kept_result = 0.0 if shape.recompute == "selective" else result
    fc2 = own + whole + result + again
    activation = own + result - kept_result + wide
    if shape.plain and shape.model.gated:  # parts of the gradient before they are joined
        activation += 3 * result
    fc1 = 2 * own + 2 * whole - kept_result
    attention = own + shape.column_bytes(3 * shape.query + 2 * shape.qkv) - kept_result - wide
    most = max(fc2, activation, fc1, attention)
    if shape.recompute == "full":
        most += kept_bytes(shape, "none") - shape.own_hidden_bytes
    return most


def _whole(shape: RankShape) -> float:
    """Hidden states of all tokens, where a form allocates them beside the own rows."""
    return shape.hidden_bytes if shape.tensor > 1 and not shape.symmetric else 0.0
