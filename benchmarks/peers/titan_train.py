"""What TorchTitan's trainer is handed: a shape, random tokens, and ears for its figures. Importing
this module imports torchtitan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

from benchmarks.peers.clock import StepClock
from benchmarks.peers.options import Options
from megascale.config import ModelConfig


class PeerTrainer(Trainer):
    """The trainer with a clock around its steps."""

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.clock = StepClock(self.device)

    @property
    def losses(self) -> list[float]:
        """Of the steps that were logged; -1 on a rank that has no loss."""
        return list(self.metrics_processor.losses)

    def train_step(self, data_iterator: Any) -> None:
        self.clock.mark()
        super().train_step(data_iterator)
        if self.step == self.job_config.training.steps:
            self.clock.mark()


class Losses(MetricsProcessor):
    """Keeps the losses, and lets memory's peaks stand, which its base resets at each line."""

    def __init__(self, job_config: Any, parallel_dims: Any, _model_args: Any = None) -> None:
        super().__init__(job_config, parallel_dims)
        self.losses: list[float] = []

    def log(self, _step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        self.losses.append(float(global_avg_loss))


class RandomTokens(BaseDataLoader):
    """Batches without end, the same on all ranks of a data-parallel rank."""

    def __init__(self, vocab_size: int, batch: int, seq: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._size = (batch, seq + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(self._vocab_size, self._size, generator=self._generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict, state_dict


def model_args(shape: ModelConfig, seq: int) -> TransformerModelArgs:
    """Its own way to say a width: 2/3 of 4 x dim, times a factor, rounded up to a multiple."""
    base = 2 * (4 * shape.hidden_size) // 3
    shrink = shape.ffn_size / (base + 1) if base > shape.ffn_size else None
    return TransformerModelArgs(
        dim=shape.hidden_size,
        n_layers=shape.num_layers,
        n_heads=shape.num_heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        multiple_of=shape.ffn_size,
        ffn_dim_multiplier=shrink,
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        max_seq_len=seq,
    )


def register(options: Options, shape: ModelConfig) -> None:
    """Our shape and loader in TorchTitan's registry of models."""
    from benchmarks.peers.titan import SPEC

    def loader(*, dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> RandomTokens:  # noqa: ARG001 - its keywords
        batch = job_config.training.local_batch_size
        return RandomTokens(shape.vocab, batch, options.seq, options.seed + dp_rank)

    spec = dataclasses.replace(
        get_train_spec(),
        model_args={SPEC: model_args(shape, options.seq)},
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
        build_validator_fn=None,
        build_metrics_processor_fn=Losses,
    )
    register_train_spec(SPEC, spec)
