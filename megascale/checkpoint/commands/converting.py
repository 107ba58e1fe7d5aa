"""`megascale checkpoint convert`: to another storage, or to whole tensors for other software.

A copy is held to the hashes of the manifest on its way, read again where it arrived, and only then
committed there: under the next free name of its step, with the next save number of that place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megascale.checkpoint.full import FullReader
from megascale.checkpoint.huggingface import write_hf_folder
from megascale.checkpoint.load import read_meta
from megascale.checkpoint.manifest import Manifest, SavedFile, claim, commit, discard, read_manifest
from megascale.checkpoint.places import Location, locate, opened, storage_of
from megascale.errors import CheckpointError, ConfigError, StorageError
from megascale.storage import Storage, check_file, is_url
from megascale.storage.writer_process import copy_file

MASTERS = "master/"


def copy_checkpoint(source: Location, root: Location) -> Location:
    """Copy one checkpoint into the folder `root`; returns where it lies there."""
    manifest = read_manifest(source)
    source_storage, source_folder = opened(source)
    target = storage_of(root)
    _refuse_without_room(target, manifest)
    folder = claim(target, manifest.step)
    try:
        for name, saved in manifest.files.items():
            _copy(source_storage, f"{source_folder}/{name}", target, f"{folder}/{name}", saved)
        commit(target, folder, manifest)
    except BaseException:
        with contextlib.suppress(StorageError):  # without a mark nobody trusts it
            discard(target, folder)
        raise
    return locate(root, folder)


def _copy(
    source: Storage, source_name: str, target: Storage, target_name: str, saved: SavedFile
) -> None:
    copied = copy_file(
        source, target, source_name, saved.header_bytes, lambda _: None, target_name=target_name
    )
    found = (copied.num_bytes, copied.header_sha256, copied.blocks)
    if found != (saved.num_bytes, saved.header_sha256, saved.blocks):
        raise CheckpointError(
            f"{source.url}: {source_name} is damaged: it is not what its manifest vouches for; "
            "copy another checkpoint"
        )
    check_file(
        target,
        target_name,
        saved.num_bytes,
        saved.header_bytes,
        saved.header_sha256,
        saved.blocks,
    )


def _refuse_without_room(target: Storage, manifest: Manifest) -> None:
    num_bytes = sum(saved.num_bytes for saved in manifest.files.values())
    free_bytes = target.free_bytes()
    if free_bytes is not None and free_bytes < num_bytes:
        raise StorageError(
            f"{target.url} has {free_bytes:,} bytes free, the checkpoint needs {num_bytes:,}; free "
            "space or name another place. Nothing was written"
        )


def write_safetensors(source: Location, output: Location, *, all_state: bool) -> int:
    """A new folder of whole logical tensors: the masters under the names of the parameters, or all
    state under its keys. Returns how many tensors. Memory: a file of at most 5 GB."""
    if not isinstance(output, Path) or is_url(str(output)):
        raise ConfigError(
            f"--to safetensors writes a folder of this machine, {output} is a URL; write a folder "
            "and copy it with the tools of that storage"
        )
    reader = FullReader(source, verified=True)  # each block is held to its hash as it is read
    keys = reader.keys("" if all_state else MASTERS)
    if not keys:
        raise CheckpointError(f"{source} holds no {MASTERS}* tensors; try --state all")
    meta = read_meta(source)
    write_hf_folder(output, _tensors(reader, keys, all_state), {"megascale": meta})
    return len(keys)


def _tensors(reader: FullReader, keys: list[str], all_state: bool) -> Iterator[tuple[str, Tensor]]:
    for key in keys:
        yield key if all_state else key.removeprefix(MASTERS), reader.read(key)
