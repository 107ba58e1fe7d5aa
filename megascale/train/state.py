"""What a run saves and restores: masters, optimizer moments, and a few numbers.

Keys are `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` with logical names and global boxes, so
any layout loads into any other. The data position is one number (consumed samples). There is no
random state: initialisation and dropout are pure functions of the seed and of global positions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from megascale.checkpoint import Piece, pieces_of_range
from megascale.config import ModelConfig, RunConfig
from megascale.errors import CheckpointError
from megascale.optim import Optimizer
from megascale.parallel.runs import Run
from megascale.parallel.zero import ShardedDataParallel

logger = logging.getLogger(__name__)

FORMAT = 1
Share = Literal["all", "counted", "copies"]
"""What a rank holds: all of it; what it counts, each element on one rank of all; the rest: what
tensor ranks above 0 replicate, and tied copies."""


@dataclass
class Progress:
    """Where a run stands; equal on all ranks."""

    step: int = 0
    consumed_samples: int = 0


def run_pieces(run: Run, prefix: str, values: Tensor, share: Share = "all") -> list[Piece]:
    """Pieces of `values` [run.stop - run.start], laid out as the run's master shard."""
    origin = run.bucket.shard_start
    blocks = [
        replace(piece.flat.block, start=piece.flat.start)
        for piece in run.owned
        if share == "all" or piece.flat.block.is_copy == (share == "copies")
    ]
    return pieces_of_range(prefix, blocks, values, origin + run.start, origin + run.stop)


def master_pieces(zero: ShardedDataParallel, share: Share = "all") -> list[Piece]:
    """Views of every master shard of this rank."""
    return [
        piece
        for run in zero.runs
        for piece in run_pieces(run, "master", run.bucket.master[run.start : run.stop], share)
    ]


def state_pieces(zero: ShardedDataParallel, optimizer: Optimizer, share: Share) -> list[Piece]:
    """Masters and moments. A checkpoint holds what each rank counts."""
    return master_pieces(zero, share) + [
        piece
        for name, values in optimizer.state().items()
        for run, flat in zip(zero.runs, values, strict=True)
        for piece in run_pieces(run, name, flat, share)
    ]


def checkpoint_meta(
    config: RunConfig,
    progress: Progress,
    num_updates: int,
    data: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON beside the tensors. `data`: `corpus.data_identity`, None where nobody knows."""
    return {
        "format": FORMAT,
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
        "num_updates": num_updates,
        "seed": config.training.seed,
        "model": config.model.model_dump(),
        "seq_len": config.training.seq_len,
        "packing": config.data.packing,
        "mask_end_of_document": config.data.mask_end_of_document,
        "document_mask": config.data.document_mask,
        "data": data,
        "dtype": config.training.dtype,
    }


# What may differ between a checkpoint and the run that loads it: it says how the parameters began.
# `max_seq_len` matters for learned positions alone, where it is the shape of a parameter.
_FREE = frozenset({"preset", "init_std", "scaled_residual_init", "max_seq_len"})
_ROPE = frozenset({"rope_theta", "rope_scaling"})  # mean nothing where positions are learned
# What may be chosen anew, said aloud. A new run may look less far back than its weights did.
_DROPOUTS = frozenset({"hidden_dropout", "attention_dropout"})
_CHOSEN_ANEW = _DROPOUTS | {"attention_window"}


def check_same_model(
    saved: dict[str, Any], model: ModelConfig, where: str, *, resume: bool
) -> None:
    """Refuse weights of another model, naming the first keys that differ.

    resume  the run goes on; else it is a new one that takes the weights
    """
    differences = _differences(ModelConfig(**saved), model)
    allowed = _DROPOUTS if resume else _CHOSEN_ANEW
    for key in sorted(differences.keys() & allowed):
        logger.warning("%s: %s", where, differences.pop(key))
    different = list(differences.values())
    if different:
        raise CheckpointError(
            f"{where} is a checkpoint of another model: {'; '.join(different[:4])}; set [model] "
            "to its values, or load another checkpoint"
        )


def check_same_samples(
    meta: dict[str, Any], config: RunConfig, data: dict[str, str], where: str
) -> None:
    """Refuse to resume where sample numbers would mean other samples."""
    pairs: list[tuple[str, object, object]] = [
        ("training.seed", meta["seed"], config.training.seed),
        ("training.seq_len", meta["seq_len"], config.training.seq_len),
        ("data.packing", meta["packing"], config.data.packing),
    ]
    # a checkpoint may be older than a key: what it does not say cannot be held against it
    for key in ("mask_end_of_document", "document_mask"):
        mask = getattr(config.data, key)
        pairs.append((f"data.{key}", meta.get(key, mask), mask))
    theirs = data | (meta["data"] or {})
    pairs += [(f"data of {name}", _short(theirs[name]), _short(data[name])) for name in data]
    for key, saved, wanted in pairs:
        if saved != wanted:
            raise CheckpointError(
                f"{where} was trained with {key} {saved!r}, this run has {wanted!r}, so its "
                "data position would mean other samples; set it back, or start a new run from "
                "these weights with checkpoint.initial_load_path"
            )


def _short(identity: str) -> str:
    """The first digits of a fingerprint; all of what is none."""
    return identity if " " in identity else identity[:16]


def check_same_tokenizer(meta: dict[str, Any], data: dict[str, str], where: str) -> None:
    """Refuse weights whose token ids mean other text."""
    theirs = meta["data"]
    if theirs is not None and theirs["tokenizer"] != data["tokenizer"]:
        raise CheckpointError(
            f"{where} was trained with tokenizer {theirs['tokenizer'][:16]!r}, the data of this "
            f"run is of {data['tokenizer'][:16]!r}; prepare the data with the tokenizer.json of "
            "that run"
        )


def _differences(theirs: ModelConfig, ours: ModelConfig) -> dict[str, str]:
    """Key to a sentence with both values, for what differs and is not free."""
    resolved = {
        "num_kv_heads": "kv_heads",
        "head_dim": "dim_per_head",
        "ffn_hidden_size": "ffn_size",
    }
    free = _FREE | (_ROPE if ours.position == "learned" else frozenset())
    differences = {}
    for key in ModelConfig.model_fields:
        if key in free:
            continue
        attribute = resolved.get(key, key)
        saved, wanted = getattr(theirs, attribute), getattr(ours, attribute)
        if saved != wanted:
            differences[key] = f"model.{key} is {saved} there and {wanted} here"
    return differences
