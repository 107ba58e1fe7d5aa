"""Weights to and from Hugging Face folders, without ever holding a second copy of the model.

Which logical parameter lies in which of their tensors is `model.hf`'s business, the folder format
`checkpoint.huggingface`'s; here the two meet a run. Reading a Hugging Face folder maps its files:
every tensor below is a view of them, so a rank touches only the bytes that it copies.

Invariant: values are not changed. An import keeps the dtype of their tensors (loading converts to
the run's), an export converts to the dtype asked for, once.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from torch import Tensor

from megascale.checkpoint import HfFolder, Piece, save_checkpoint, write_hf_folder
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.saved_model import TOKENIZER, SavedModel, open_saved_model
from megascale.config import JobConfig, ModelConfig, RunConfig, TrainingConfig
from megascale.data import load_tokenizer
from megascale.errors import CheckpointError, ConfigError
from megascale.model.hf import from_hf, hf_family, hf_tensors
from megascale.model.hf_config import hf_config, model_config_from_hf
from megascale.shards import Box
from megascale.train.run_folder import RunFolder
from megascale.train.state import Progress, check_same_model, checkpoint_meta

EXPORT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TOKENIZER_CONFIG = "tokenizer_config.json"


def export_to_hf(source: Path, output: Path, *, dtype: str) -> str:
    """Write the newest good checkpoint of a run folder (or a checkpoint) for transformers.

    Streams: host memory is one shard of the output. Returns a sentence that says what was written.
    Raises ConfigError for a model that no family computes, CheckpointError for what cannot be read,
    or an `output` that is not new.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not legal; legal: {', '.join(EXPORT_DTYPES)}")
    _refuse_existing(output)
    saved = open_saved_model(source)
    with tempfile.TemporaryDirectory() as scratch:
        files, end_of_document_id = _tokenizer_files(saved, Path(scratch))
        config = hf_config(
            saved.model,
            num_positions=saved.num_positions,
            dtype=dtype,
            eos_token_id=end_of_document_id,
        )
        write_hf_folder(output, _hf_stream(saved, EXPORT_DTYPES[dtype]), config, files=files)
    with_tokenizer = "with its tokenizer" if files else "without a tokenizer, the run has none"
    return (
        f"wrote {saved.checkpoint} as a {hf_family(saved.model)} model in {dtype} to {output}, "
        f"{with_tokenizer}"
    )


def _hf_stream(saved: SavedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for tensor in hf_tensors(saved.model):
        logical = {part: saved.parameter(part).to(dtype) for part in tensor.parts}
        yield tensor.name, tensor.join(logical)


def _tokenizer_files(saved: SavedModel, scratch: Path) -> tuple[list[Path], int | None]:
    """The files that make transformers load the very tokenizer, and its end of document.

    Without a tokenizer_config.json, transformers would build the one that it knows for the family.
    """
    if saved.tokenizer is None:
        return [], None
    tokenizer = load_tokenizer(saved.tokenizer)
    tokenizer.save(scratch)
    given = saved.tokenizer.with_name(TOKENIZER_CONFIG)
    config = given if given.is_file() else scratch / TOKENIZER_CONFIG
    return [scratch / TOKENIZER, config], tokenizer.end_of_document_id


def import_from_hf(source: Path, output: Path) -> str:
    """Make a run folder, with a checkpoint of step 0, of a Hugging Face folder.

    The checkpoint holds masters alone: training starts from it by `checkpoint.initial_load_path`
    with a fresh optimizer. Returns a sentence that says what was made; a failure leaves nothing.
    """
    _refuse_existing(output)
    theirs = HfFolder(source)
    model = _model_config(theirs)
    seq_len = TrainingConfig().seq_len
    config = RunConfig(
        job=JobConfig(run_dir=str(output), description=f"imported from {source}"),
        model=model,
        training=TrainingConfig(seq_len=min(seq_len, model.max_seq_len or seq_len)),
    )
    pieces = [_whole(name, tensor) for name, tensor in _logical_views(theirs, model).items()]
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, output, ignore_errors=True)
        run = RunFolder(output)
        save_checkpoint(run.checkpoints, 0, pieces, checkpoint_meta(config, Progress(), 0))
        run.open(config, [source / TOKENIZER, source / TOKENIZER_CONFIG])
        undo.pop_all()
    num_parameters = sum(piece.tensor.numel() for piece in pieces)
    return (
        f"made the run folder {output} of {num_parameters:,} parameters; train from it with "
        f"--set checkpoint.initial_load_path={output} and its [model] section"
    )


def hf_master_pieces_loader(
    folder: Path,
    pieces: list[Piece],
    model: ModelConfig,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill live `master/NAME` pieces, of any layout, straight from a Hugging Face folder.

    Collective over `group`. Raises CheckpointError on all ranks where the folder is of another
    model than `model`, or damaged.
    """
    Ranks(group).gather(lambda: _fill_masters(folder, pieces, model))


@torch.no_grad()
def _fill_masters(folder: Path, pieces: list[Piece], model: ModelConfig) -> None:
    theirs = HfFolder(folder)
    their_model = _model_config(theirs)
    check_same_model(their_model.model_dump(), model, str(folder), resume=False)
    logical = _logical_views(theirs, their_model)
    for piece in pieces:
        name = piece.key.removeprefix("master/")
        stored = logical[name]
        if tuple(stored.shape) != piece.global_shape:  # learned positions: all else was compared
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(stored.shape)}, this run's is "
                f"{piece.global_shape}; set model.max_seq_len = {their_model.max_seq_len}"
            )
        corners = zip(piece.box.offset, piece.box.shape, strict=True)
        piece.tensor.copy_(stored[tuple(slice(start, start + size) for start, size in corners)])


def _model_config(theirs: HfFolder) -> ModelConfig:
    try:
        return model_config_from_hf(theirs.config)
    except ConfigError as error:
        why = str(error)
    except KeyError as error:
        why = f"config.json has no {error}"
    except ValidationError as error:
        why = "; ".join(map(_problem, error.errors(include_url=False)))
    except TypeError as error:
        why = f"a value in config.json is of another kind than it should be ({error})"
    raise CheckpointError(f"{theirs.path} cannot be read as a model of ours: {why}")


def _problem(details: ErrorDetails) -> str:
    """One of pydantic's problems in a few words; what a validator of ours says of the whole model
    stands alone."""
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] != "value_error":
        message = f"{message}, got {details['input']!r}"
    where = ".".join(map(str, details["loc"]))
    return f"model.{where}: {message}" if where else message


def _logical_views(theirs: HfFolder, model: ModelConfig) -> dict[str, Tensor]:
    """Every logical parameter as a view of the mapped files; all must be there, and no others."""
    stored = {name: theirs.read(name) for name in theirs.names()}
    return from_hf(model, num_positions=model.max_seq_len or 1, stored=stored)


def _whole(name: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(f"master/{name}", shape, Box((0,) * len(shape), shape), tensor)


def _refuse_existing(output: Path) -> None:
    """Before anything is hashed or read: that can take minutes."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"{output} exists and is not empty; name another folder, or remove it"
        )
