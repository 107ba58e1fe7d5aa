"""The parameters of a pipeline stage as the trainer stores them, on the meta device."""

from __future__ import annotations

import torch

from megascale.config import RunConfig
from megascale.parallel.tensor import StoredParameter, TensorParallel
from megascale.plan.stages import split_layers
from megascale.train.assemble import _chunk


def stored_of_stage(config: RunConfig, stage: int) -> list[tuple[list[str], list[StoredParameter]]]:
    """(unit names, parameters) of each chunk of a stage, of one tensor rank."""
    par = config.parallelism
    layers = split_layers(config.model.num_layers, par.num_chunks)
    tied = config.model.tie_embeddings and par.pipeline_parallel_size > 1
    found = []
    for number in range(stage, par.num_chunks, par.pipeline_parallel_size):
        alone = TensorParallel(None, 0, 1)
        chunk, stored = _chunk(config, layers, number, alone, torch.bfloat16, tied)
        found.append(([name for name, _ in chunk.units()], stored))
    return found
