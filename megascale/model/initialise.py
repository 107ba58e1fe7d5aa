"""Initial values as a function of (seed, logical name, global index): the same in every layout.

Matrices are normal with `init_std`; the two projections back into the residual stream (o and fc2)
are scaled by 1 / sqrt(2 x layers), so that the stream's variance does not grow with depth (GPT-2,
Megatron). Norm weights are one, biases zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.model.layers import LogicalModule
from megascale.ops.random import fill_normal_
from megascale.shards import Block, Box

InitRule = tuple[Literal["normal"], float] | tuple[Literal["ones", "zeros"]]


def init_rules(cfg: ModelConfig) -> Callable[[str], InitRule]:
    """The function from a logical parameter's name to how it begins."""
    residual_std = cfg.init_std
    if cfg.scaled_residual_init:
        residual_std /= math.sqrt(2.0 * cfg.num_layers)

    def rule(name: str) -> InitRule:
        module, kind = name.rsplit(".", 1)
        if kind == "bias":
            return ("zeros",)
        if "norm" in module.rsplit(".", 1)[-1]:
            return ("ones",)
        if module.endswith((".attn.o", ".mlp.fc2")):
            return ("normal", residual_std)
        return ("normal", cfg.init_std)

    return rule


@torch.no_grad()
def initialise_block_(storage: Tensor, block: Block, rule: InitRule, seed: int) -> None:
    """Fill what `block` says of the contiguous `storage`; any shard gets the global values."""
    view = storage.view(-1)[block.start : block.stop].view(block.box.shape)
    if rule[0] == "normal":
        fill_normal_(view, seed, block.name, block.box, block.global_shape, rule[1])
    else:
        view.fill_(1.0 if rule[0] == "ones" else 0.0)


def unsharded_blocks(model: nn.Module) -> list[tuple[nn.Parameter, list[Block]]]:
    """Each parameter of a model that is not sharded, with its blocks; a tied parameter once."""
    found: dict[int, tuple[nn.Parameter, list[Block]]] = {}
    for module in model.modules():
        if not isinstance(module, LogicalModule):
            continue
        for attribute, row_blocks in module.storage_blocks().items():
            parameter = getattr(module, attribute)
            blocks, start = [], 0
            for name, rows in row_blocks:
                shape = (rows, *parameter.shape[1:])
                blocks.append(Block(name, shape, Box((0,) * len(shape), shape), start))
                start = blocks[-1].stop
            found.setdefault(id(parameter), (parameter, blocks))
    return list(found.values())


def initialise(model: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Fill every parameter of an unsharded model."""
    rule = init_rules(cfg)
    for parameter, blocks in unsharded_blocks(model):
        for block in blocks:
            initialise_block_(parameter, block, rule(block.name), seed)


def logical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Logical name to a view of the unsharded model's storage (shares memory)."""
    return {
        block.name: parameter.detach().view(-1)[block.start : block.stop].view(block.box.shape)
        for parameter, blocks in unsharded_blocks(model)
        for block in blocks
    }
