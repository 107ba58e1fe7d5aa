"""The sizes that calibration measures: those of transformer layers, from 1B to 530B, cut by TP.

Products are of a layer's four linears at several hidden sizes and tensor-parallel degrees, for the
tokens of usual micro-batches, in all three directions. What a plan asks for lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from megascale.plan.work.operations import Attention, Direction, Gemm

MOST_GEMM_FLOPS = 1.2e13  # 17 ms on an H200: larger ones run at the rate of these


@dataclass(frozen=True)
class Grid:
    """What to measure; `FULL` takes about three minutes of an H200, `QUICK` one."""

    hidden: tuple[int, ...]
    tensor: tuple[int, ...]
    tokens: tuple[int, ...]
    head_dims: tuple[int, ...]
    seq_lens: tuple[int, ...]
    attention_heads: tuple[int, ...]
    window_seq_lens: tuple[int, ...]
    pass_bytes: tuple[int, ...]
    transfer_bytes: tuple[int, ...]

    def linears(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of a layer's linears, of the head, and of gated ones, each once."""
        found = set()
        for hidden, tensor in product(self.hidden, self.tensor):
            found |= {
                (3 * hidden // tensor, hidden),
                (hidden, hidden // tensor),
                (4 * hidden // tensor, hidden),
                (hidden, 4 * hidden // tensor),
            }
            found.add((64_000 // tensor, hidden))
        return sorted(found)

    def gemms(self) -> list[Gemm]:
        """Every product, in the convention of `work.operations.Gemm`."""
        found = []
        for (outputs, inputs), tokens in product(self.linears(), self.tokens):
            sizes = {
                Direction.FORWARD: (tokens, outputs, inputs),
                Direction.DGRAD: (tokens, inputs, outputs),
                Direction.WGRAD: (outputs, inputs, tokens),
            }
            for direction, (rows, columns, depth) in sizes.items():
                gemm = Gemm(str(direction), rows, columns, depth, direction)
                if gemm.flops <= MOST_GEMM_FLOPS:
                    found.append(gemm)
        return found

    def attentions(self) -> list[Attention]:
        """Forwards of cores: as many key-value heads, a quarter of them, and with a window."""
        found = []
        for seq_len, heads, head_dim in product(
            self.seq_lens, self.attention_heads, self.head_dims
        ):
            kinds: list[tuple[int, int | None]] = [(heads, None), (max(1, heads // 4), None)]
            if seq_len in self.window_seq_lens and heads == self.attention_heads[-1]:
                kinds.append((heads, seq_len * 3 // 8))
            sequences = max(1, 4096 // seq_len)
            found += [
                Attention("core", sequences, seq_len, heads, kv_heads, head_dim, window, False)
                for kv_heads, window in kinds
            ]
        return found


_MIB = 2**20

FULL = Grid(
    hidden=(2048, 4096, 8192, 12288, 20480),
    tensor=(1, 2, 4, 8),
    tokens=(1024, 2048, 4096, 8192, 16384),
    head_dims=(64, 96, 128),
    seq_lens=(1024, 2048, 4096, 8192),
    attention_heads=(4, 12, 32),
    window_seq_lens=(2048, 8192),
    pass_bytes=tuple(4**i * _MIB for i in range(6)),
    transfer_bytes=tuple(4**i * 2**12 for i in range(10)),
)
QUICK = Grid(
    hidden=(4096, 12288),
    tensor=(1, 8),
    tokens=(2048, 8192),
    head_dims=(128,),
    seq_lens=(2048,),
    attention_heads=(12,),
    window_seq_lens=(2048,),
    pass_bytes=(4 * _MIB, 256 * _MIB),
    transfer_bytes=(2**20, 2**26),
)
