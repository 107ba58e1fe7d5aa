"""Files of format 2 made in the plainest way, with blocks of any size; a storage that counts.

Written here from the layout's description and not with what saves in earnest, so that what loads
is compared with a second opinion.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from megascale.checkpoint.layout import Entry, encode_header
from megascale.checkpoint.manifest import Manifest, SavedFile
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.reading import Files
from megascale.storage import BLOCK_BYTES, LocalFolder

FOLDER = "step-00000007"


def save_files(
    root: Path, pieces_by_rank: Iterable[Sequence[Piece]], *, block_bytes: int = BLOCK_BYTES
) -> Files:
    """One file a rank, widest values first; no mark, no durability."""
    folder = root / FOLDER
    folder.mkdir(parents=True)
    saved = {}
    for rank, pieces in enumerate(pieces_by_rank):
        name = f"rank-{rank:05d}.safetensors"
        header, values = _file(pieces)
        (folder / name).write_bytes(header + values)
        saved[name] = SavedFile(
            len(header) + len(values),
            len(header),
            hashlib.sha256(header).hexdigest(),
            tuple(
                hashlib.sha256(values[start : start + block_bytes]).hexdigest()
                for start in range(0, len(values), block_bytes)
            ),
        )
    return Files(CountingFolder(root), FOLDER, Manifest(7, {}, saved), block_bytes)


def _file(pieces: Sequence[Piece]) -> tuple[bytes, bytes]:
    entries: list[Entry] = []
    values = b""
    for piece in sorted(pieces, key=lambda piece: -piece.tensor.element_size()):
        tensor = piece.tensor.detach()
        entries.append(Entry(piece.key, piece.global_shape, piece.box, tensor.dtype, len(values)))
        values += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return encode_header(entries), values


class CountingFolder(LocalFolder):
    """Remembers each range that was read: (name, start, number of bytes).

    before  called with each of them first, from the reading thread
    """

    def __init__(
        self, root: Path, *, before: Callable[[str, int], None] = lambda _name, _start: None
    ) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []
        self.before = before
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.before(name, start)
        with self._lock:
            self.ranges.append((name, start, out.nbytes))
        super().read_into(name, start, out)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self.ranges)
