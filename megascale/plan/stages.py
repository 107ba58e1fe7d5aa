"""Which layers each chunk holds.

Rule: contiguous, as even as possible; the first `num_layers % num_chunks` chunks hold one layer
more. The last chunk also holds the output head (6 h V FLOPs a token, 3.5 % of a stage of the 175B
model in 8 stages), so it is never the larger one. No layer is ever dropped.
"""

from __future__ import annotations

from itertools import pairwise

from megascale.errors import ConfigError


def split_layers(num_layers: int, num_chunks: int) -> list[range]:
    """The layers of each chunk, in order. Raises ConfigError where a chunk would be empty."""
    assert num_chunks >= 1, num_chunks
    if num_layers < num_chunks:
        raise ConfigError(
            f"{num_layers} layers cannot fill {num_chunks} chunks; each chunk needs a layer: lower "
            "parallelism.pipeline_parallel_size or parallelism.virtual_pipeline_size"
        )
    base, larger = divmod(num_layers, num_chunks)
    starts = [chunk * base + min(chunk, larger) for chunk in range(num_chunks + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
