"""Run folders as training leaves them, with a checkpoint of a model that has values."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import nn

from megascale.checkpoint import save_checkpoint
from megascale.config import ModelConfig, RunConfig, TrainingConfig
from megascale.data import TextTokenizer, train_bpe
from megascale.model.initialise import logical_tensors
from megascale.train.run_folder import RunFolder
from megascale.train.state import Progress, checkpoint_meta
from tests.checkpoint.layouts import whole

POSITIONS = 64
TEXT = "def add(first, second):\n    return first + second\n"


@functools.cache
def tokenizer() -> TextTokenizer:
    return train_bpe([TEXT * 4], vocab_size=270)


def save_run(
    folder: Path, cfg: ModelConfig, model: nn.Module, *, with_tokenizer: bool = True, step: int = 3
) -> Path:
    """Save `model` as the checkpoint of `step` of the run in `folder`; returns the checkpoint."""
    run = RunFolder(folder)
    config = RunConfig(model=cfg, training=TrainingConfig(seq_len=POSITIONS))
    meta = checkpoint_meta(config, Progress(step, 8 * step), step)
    pieces = [whole(f"master/{name}", values) for name, values in logical_tensors(model).items()]
    checkpoint = save_checkpoint(run.checkpoints, step, pieces, meta)
    run.open(config, [])
    if with_tokenizer:
        run.tokenizer_file.write_bytes(tokenizer().tokenizer_json)
    return checkpoint
