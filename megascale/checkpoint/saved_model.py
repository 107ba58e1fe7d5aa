"""The model inside a checkpoint: where a path given by the user leads, its shape, its weights.

What converts and what generates want the same of a checkpoint, whoever trained it: the newest good
one of a run, the configuration that its meta carries, whole parameters by logical name, and the
tokenizer that lies in the run folder (`RUN/tokenizer.json`, `RUN/checkpoints/step-N`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.full import FullReader
from megascale.checkpoint.huggingface import CONFIG, INDEX, SINGLE
from megascale.checkpoint.load import check_sizes, find_latest, read_meta
from megascale.checkpoint.manifest import MANIFEST, is_checkpoint_name
from megascale.config import ModelConfig
from megascale.errors import CheckpointError

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"


def find_checkpoint(path: Path, *, group: dist.ProcessGroup | None = None) -> Path:
    """The checkpoint that `path` names: itself, or the newest one that looks whole of a run folder
    or of a folder of checkpoints.

    Its data are not read here: whoever reads them checks them. Collective over `group`. Raises
    CheckpointError on all ranks where there is none.
    """
    root = Ranks(group).writer_does(lambda: _root_in(path))
    if root is not None:
        found = find_latest(root, group=group)
        if found is None:
            raise CheckpointError(
                f"{root} holds no checkpoint that can be loaded; train the run until its first "
                "save (checkpoint.interval, checkpoint.save_at_end), or name another run"
            )
        return found
    Ranks(group).writer_does(lambda: _refuse_what_is_no_checkpoint(path))
    check_sizes(path, group=group)
    return path


def _root_in(path: Path) -> Path | None:
    """The folder of checkpoints that `path` is or holds."""
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    holds = path.is_dir() and any(is_checkpoint_name(entry.name) for entry in path.iterdir())
    return path if holds else None


def _refuse_what_is_no_checkpoint(path: Path) -> None:
    if (path / MANIFEST).is_file():
        return
    scheme, slash, rest = str(path).partition(":/")  # a Path has lost the second one
    if slash and "/" not in scheme:
        raise CheckpointError(
            f"{scheme}://{rest} is not on a disk, which is needed here; first: megascale "
            f"checkpoint convert {scheme}://{rest} FOLDER"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give a run folder or a checkpoint in it")
    if (path / CONFIG).is_file() and ((path / SINGLE).is_file() or (path / INDEX).is_file()):
        raise CheckpointError(
            f"{path} is a Hugging Face folder; first: megascale convert from-hf {path} "
            "NEW_RUN_DIR, or, to train from it, set checkpoint.initial_load_in_hf = true"
        )
    raise CheckpointError(
        f"{path} is neither a run folder (no {CHECKPOINTS}/ in it), nor a folder of checkpoints, "
        f"nor a checkpoint that was saved to its end (no {MANIFEST}); give one of these"
    )


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint, opened; what is read of it is checked.

    num_positions  rows of learned positions, else the longest sequence that it was made for
    tokenizer      tokenizer.json of its run folder; None where there is none
    """

    checkpoint: Path
    model: ModelConfig
    num_positions: int
    tokenizer: Path | None
    reader: FullReader

    def parameter(self, name: str) -> Tensor:
        """The whole logical parameter, on the CPU, as the optimizer holds it."""
        return self.reader.read(f"master/{name}")


def open_saved_model(path: Path) -> SavedModel:
    """Open a run folder's newest good checkpoint, or the checkpoint at `path`; one process."""
    checkpoint = find_checkpoint(path)
    meta = read_meta(checkpoint)
    try:
        model, seq_len = ModelConfig(**meta["model"]), int(meta["seq_len"])
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(
            f"{checkpoint} does not say its model in a form that this version reads ({error}); "
            "use the version of megascale that wrote it"
        ) from None
    tokenizer = checkpoint.resolve().parent.parent / TOKENIZER
    return SavedModel(
        checkpoint,
        model,
        model.max_seq_len or seq_len,
        tokenizer if tokenizer.is_file() else None,
        FullReader(checkpoint, verified=True),
    )
