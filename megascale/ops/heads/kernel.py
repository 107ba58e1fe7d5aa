"""The kernel that joins q, k and v into one matrix, turning q and k on the way.

Bytes an element in 16 bits: 4, beside the table. A program has some tokens and some heads; the
tokens' angles stay in registers from head to head. fp32 inside.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def join_heads_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,  # None: nothing is turned
    sin_ptr,
    out_ptr,
    num_tokens,
    seq_len,
    num_q,
    num_kv,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    out_row_stride,
    heads_each,
    num_blocks,
    HEAD: tl.constexpr,  # elements of a head
    BACK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,  # the power of 2 that holds a head, or half of it where heads are turned
):
    """out[token, head] = that of q, k or v. Programs: blocks of heads x blocks of tokens."""
    program = tl.program_id(0)
    tokens = (program // num_blocks) * TOKENS + tl.arange(0, TOKENS)
    first = (program % num_blocks) * heads_each
    last = tl.minimum(first + heads_each, num_q + 2 * num_kv)
    batch = (tokens // seq_len).to(tl.int64)[:, None]
    position = tokens % seq_len
    elements = tl.arange(0, WIDTH)
    size = HEAD if cos_ptr is None else HEAD // 2
    inside = (tokens < num_tokens)[:, None] & (elements < size)[None, :]
    rows = out_ptr + tokens.to(tl.int64)[:, None] * out_row_stride + elements[None, :]
    if cos_ptr is not None:
        angles = position[:, None] * size + elements[None, :]
        cos = tl.load(cos_ptr + angles, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angles, mask=inside, other=0.0)
        if BACK:
            sin = -sin
    far = position.to(tl.int64)[:, None]
    for head in range(first, last):
        own = tl.cast(head, tl.int64)  # heads may lie a whole sequence apart
        if head < num_q:
            source = q_ptr + batch * q_batch_stride + far * q_token_stride + own * q_head_stride
        elif head < num_q + num_kv:
            own -= num_q
            source = k_ptr + batch * k_batch_stride + far * k_token_stride + own * k_head_stride
        else:
            own -= num_q + num_kv
            source = v_ptr + batch * v_batch_stride + far * v_token_stride + own * v_head_stride
        source += elements[None, :]
        out = rows + head * HEAD
        if cos_ptr is None:
            tl.store(out, tl.load(source, mask=inside), mask=inside)
        else:
            one = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            two = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
            turns = head < num_q + num_kv
            c = tl.where(turns, cos, 1.0)
            s = tl.where(turns, sin, 0.0)
            tl.store(out, (one * c - two * s).to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(out + size, (two * c + one * s).to(out_ptr.dtype.element_ty), mask=inside)
