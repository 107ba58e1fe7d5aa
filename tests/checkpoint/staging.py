"""States held in files of memory, as slots hold them, for saves behind training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from megascale.checkpoint import Piece, Staged
from megascale.checkpoint.tiling import arrange

START = 8192  # of the values: a slot's own header and table lie before


class Held:
    """A slot with the values of `pieces`; `released` is set once."""

    def __init__(
        self, path: Path, pieces: Iterable[Piece], *, wait: Callable[[], None] = lambda: None
    ) -> None:
        ordered, entries = arrange(pieces)
        self.path = path
        path.write_bytes(bytes(START) + b"".join(_bytes_of(piece.tensor) for piece in ordered))
        self.released = threading.Event()
        self._entries, self._wait = tuple(entries), wait

    def staged(self, step: int) -> Staged:
        return Staged(
            step, 8 * step, self.path, START, self._entries, self._wait, release=self._release
        )

    def _release(self) -> None:
        assert not self.released.is_set(), "released twice"
        self.released.set()
        os.truncate(self.path, START)  # whoever still reads it finds nothing


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
