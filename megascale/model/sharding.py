"""How tensor parallelism shards the transformer, as data: module path patterns to placements.

`parallel` matches paths with fnmatch, first row wins, and refuses a module with parameters that no
row matches: a new module without a row cannot be silently replicated. A new model is new rows.
"""

from __future__ import annotations

from megascale.config import ModelConfig
from megascale.shards import Placement

_COMMON = [
    ("embed.tokens", Placement.VOCAB),
    ("embed.positions", Placement.REPLICATED),
    ("layers.*.norm1", Placement.REPLICATED),
    ("layers.*.attn.q_norm", Placement.REPLICATED),
    ("layers.*.attn.k_norm", Placement.REPLICATED),
    ("final_norm", Placement.REPLICATED),
    ("head", Placement.VOCAB),
]
_BLOCKS = {
    "serial": [
        ("layers.*.attn.qkv", Placement.COLUMN),
        ("layers.*.attn.o", Placement.ROW),
        ("layers.*.norm2", Placement.REPLICATED),
        ("layers.*.mlp.fc1", Placement.COLUMN),
        ("layers.*.mlp.fc2", Placement.ROW),
    ],
    "parallel": [
        ("layers.*.in_proj", Placement.COLUMN),
        ("layers.*.out_proj", Placement.ROW),
    ],
}


def sharding_table(cfg: ModelConfig) -> list[tuple[str, Placement]]:
    """Rows (glob of module path, placement) for the modules that this configuration has."""
    return _COMMON + _BLOCKS[cfg.block]
