"""A small prepared folder, made once a session; a guard against started ranks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megascale.data import prepare
from megascale.train import launch


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of a few hundred short documents; do not change them, take `data`."""
    root = tmp_path_factory.mktemp("prepared")
    rng = random.Random(0)
    words = ("the", "loss", "of", "a", "model", "falls", "from", "step", "to", "never", "rises")
    for number in range(200):
        text = " ".join(rng.choice(words) for _ in range(60))
        (root / f"{number:03d}.txt").write_text(text + "\n")
    prepare([str(root)], "train:BPE:280", root / "data", workers=1, validation_fraction=0.2)
    return root / "data"


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder to damage."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a local rank is an error."""

    def start(*_: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(launch, "_start", start)
