"""Hugging Face folders: safetensors weights (one file, or shards with an index) and config.json.

Names and layouts of tensors are the model package's business; here is only the folder format.
Invariants: a folder appears under its name whole or not at all; nothing that exists is overwritten;
reading unpickles nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megascale.checkpoint.durable import fsync_path
from megascale.errors import CheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_hf_folder(
    output: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict[str, Any],
    *,
    files: Sequence[Path] = (),
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a stream of (name, tensor), `config`, and copies of `files` (tokenizer.json).

    Holds one shard in memory at a time. Refuses an `output` that exists and is not an empty folder.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"{output} exists and is not empty; name another folder, or remove it"
        )
    with _appearing(output) as folder:
        _write_weights(folder, tensors, max_shard_bytes)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for file in files:
            shutil.copyfile(file, folder / file.name)


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A temporary folder beside `output` that takes its name at the end, or is removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield folder
        for path in folder.iterdir():
            fsync_path(path)
        fsync_path(folder)
        folder.chmod(0o755)  # mkdtemp's is for the owner alone
        os.rename(folder, output)
        fsync_path(output.parent)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(f"the disk of {output} is full; free space and try again") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    shard_of: dict[str, int] = {}
    total_bytes = num_shards = 0
    for shard in _shards(tensors, max_shard_bytes):
        repeated = shard_of.keys() & shard.keys()
        assert not repeated, f"names given twice: {sorted(repeated)}"
        shard_of |= dict.fromkeys(shard, num_shards)
        total_bytes += sum(map(_num_bytes, shard.values()))
        save_file(shard, folder / f"{num_shards}.part", metadata={"format": "pt"})
        num_shards += 1
    if num_shards == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for i, name in enumerate(names):
        (folder / f"{i}.part").rename(folder / name)
    weight_map = {tensor: names[i] for tensor, i in sorted(shard_of.items())}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Fill shards in order; a tensor larger than `max_bytes` has one to itself. At least one."""
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + _num_bytes(tensor) > max_bytes:
            yield shard
            shard, num_bytes = {}, 0
        assert name not in shard, f"name given twice: {name}"
        # safetensors refuses tensors that share storage, as views of fused ones do.
        tensor = tensor.detach().cpu().contiguous()
        shared = tensor.untyped_storage().nbytes() != _num_bytes(tensor)
        shard[name] = tensor.clone() if shared else tensor
        num_bytes += _num_bytes(tensor)
    yield shard


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class HfFolder:
    """Reads a folder lazily, tensor by tensor; files are mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        if not path.is_dir():
            raise CheckpointError(f"no Hugging Face folder at {path}: there is no such directory")
        if (path / INDEX).is_file():
            self._file_of: dict[str, str] = _read_json(path / INDEX)["weight_map"]
        elif (path / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise CheckpointError(
                f"{path} has neither {SINGLE} nor {INDEX}; only safetensors weights are read "
                "(save others with save_pretrained(..., safe_serialization=True) first)"
            )

    @property
    def config(self) -> dict[str, Any]:
        return _read_json(self.path / CONFIG)

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._holder(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._holder(name).get_tensor(name)
        return tensor

    def _holder(self, name: str) -> Any:
        if name not in self._file_of:
            near = difflib.get_close_matches(name, self._file_of, n=1)
            hint = f"; nearest: {near[0]!r}" if near else ""
            raise CheckpointError(f"{self.path} has no tensor {name!r}{hint}")
        file = self._file(self._file_of[name])
        if name not in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            raise CheckpointError(
                f"{self.path}: {INDEX} says {self._file_of[name]} holds {name!r}, but it does not; "
                "download the folder again"
            )
        return file

    def _file(self, file_name: str) -> Any:
        if file_name not in self._open:
            path = self.path / file_name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, {INDEX} names it; download it again")
            try:
                self._open[file_name] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged ({error}); download it again") from error
        return self._open[file_name]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a Hugging Face folder has one") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return content
