"""What lies where in a file of state: safetensors, with a name and a place for each piece.

    [0, 8)     length of the JSON, little-endian
    [8, h)     JSON, filled with spaces: h is a multiple of 4,096
    [h, ...)   values, no gaps

A piece is an entry `KEY@OFFSET,OFFSET`; the shapes of whole tensors are in the file's metadata. So
every file opens with the safetensors library, nothing is ever pickled, and the values of a file lie
as they do in a memory slot: writing one is moving bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megascale.errors import CheckpointError
from megascale.shards import Box

HEADER_ALIGNMENT = 4096
FORMAT = "megascale-2"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """`box` of the logical tensor `key` (of `global_shape`), `dtype`, from byte `start` of the
    values on, row-major."""

    key: str
    global_shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.box.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes

    @property
    def name(self) -> str:
        return f"{self.key}@{','.join(map(str, self.box.offset))}"


def encode_header(entries: Sequence[Entry]) -> bytes:
    """The header of a file of `entries`, which follow each other without gaps from 0 on."""
    ends = [0, *(entry.stop for entry in entries)]
    assert [entry.start for entry in entries] == ends[:-1], "entries with gaps between them"
    shapes = {entry.key: entry.global_shape for entry in entries}
    content: dict[str, object] = {
        "__metadata__": {"format": FORMAT, "global_shapes": json.dumps(shapes)}
    }
    for entry in entries:
        assert entry.name not in content, f"{entry.name} twice"
        content[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": entry.box.shape,
            "data_offsets": (entry.start, entry.stop),
        }
    data = json.dumps(content, separators=(",", ":")).encode()
    length = -(-(8 + len(data)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT - 8
    return length.to_bytes(8, "little") + data.ljust(length)


def decode_header(header: bytes, where: str) -> list[Entry]:
    """The entries of a header, in the order of their values. Raises CheckpointError, with `where`,
    for what is no header of ours."""
    try:
        length = int.from_bytes(header[:8], "little")
        content = json.loads(header[8 : 8 + length])
        metadata = content.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r}, this version reads {FORMAT!r}")
        shapes = json.loads(metadata["global_shapes"])
        entries = [_entry(name, fields, shapes) for name, fields in content.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is not a file of this format ({error}); use another checkpoint"
        ) from None
    entries.sort(key=lambda entry: entry.start)
    if any(entry.start != stop for entry, stop in zip(entries, _stops(entries), strict=True)):
        raise CheckpointError(f"{where}: its values do not lie end to end; use another checkpoint")
    return entries


def _stops(entries: Iterable[Entry]) -> list[int]:
    """Where each should start: the end of the one before."""
    return [0, *(entry.stop for entry in entries)][:-1]


def _entry(name: str, fields: Any, shapes: dict[str, list[int]]) -> Entry:
    key, _, offset = name.rpartition("@")
    start, stop = map(int, fields["data_offsets"])
    box = Box(tuple(map(int, offset.split(","))) if offset else (), tuple(fields["shape"]))
    entry = Entry(key, tuple(shapes[key]), box, _TORCH[fields["dtype"]], start)
    if entry.stop != stop:
        raise ValueError(f"{name} has {stop - start} bytes, its shape needs {entry.num_bytes}")
    return entry
