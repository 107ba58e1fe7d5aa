"""Saves that follow each other take no more memory than the first two (pytorch#170163)."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from tests.checkpoint.memory.test_slots import _open, memory

__all__ = ["memory"]
NUM_VALUES = 1 << 21  # 8 MiB


def _taken(folder: Path) -> tuple[int, int]:
    """Bytes of the files, and of this process's memory."""
    files = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return files, pages * resource.getpagesize()


def test_saves_do_not_pile_up(memory: Path) -> None:
    slots = _open(memory, torch.zeros(NUM_VALUES), is_behind=True)
    taken = []
    for step in range(1, 41):
        slots.begin(step, step)
        slots.before_update()
        slots.settled()
        taken.append(_taken(memory))
    slots.join()
    files, own = zip(*taken[4:], strict=True)
    assert max(files) == min(files), "two slots, whatever is saved"
    assert max(own) - min(own) < 2 * 4 * NUM_VALUES
