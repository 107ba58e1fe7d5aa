"""What nodes reached when they passed: one small file a node in the run folder.

A speed that the table does not know is learned at a node's first pass and kept, so a node that
decays cannot lower its own bar; the bar is the median over the nodes that have the same kind of
device. A hash of the replay is kept whatever came of the check: who is right is a majority's word.
Files are replaced whole, and each node writes its own only: no locks.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any


class Learned:
    """The run folder's memory of the nodes' checks, read once."""

    def __init__(self, run_dir: Path, node: str) -> None:
        self._folder = run_dir / "selfcheck"
        self._file = self._folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', node)}.json"
        self._nodes: dict[str, dict[str, Any]] = {}
        for path in self._folder.glob("*.json"):
            with suppress(OSError, ValueError):  # a torn or foreign file teaches nothing
                found = json.loads(path.read_text())
                if isinstance(found, dict):
                    self._nodes[path.stem] = found
        self._own: dict[str, Any] = self._nodes.setdefault(self._file.stem, {})

    def speed(self, key: str) -> float | None:
        """The median over nodes of what was learned under `key`."""
        speeds = [v for node in self._nodes.values() if (v := _table(node, "speeds").get(key))]
        return statistics.median(speeds) if speeds else None

    def hashes(self, kind: str) -> dict[str, str]:
        """Other nodes' newest hash of this kind of device."""
        return {
            name: found
            for name, node in self._nodes.items()
            if node is not self._own and (found := _table(node, "hashes").get(kind))
        }

    @property
    def num_gpus(self) -> int | None:
        """The most that this node has shown."""
        found = self._own.get("gpus")
        return found if isinstance(found, int) else None

    def keep_speed(self, key: str, value: float) -> None:
        self._own.setdefault("speeds", {}).setdefault(key, round(value, 3))

    def keep_hash(self, kind: str, digest: str) -> None:
        self._own.setdefault("hashes", {})[kind] = digest

    def keep_num_gpus(self, count: int) -> None:
        self._own["gpus"] = max(count, self.num_gpus or 0)

    def save(self) -> None:
        """OSError where the folder cannot be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": 1, **self._own}, indent=1)
        part = self._file.with_name(f".{self._file.name}.{uuid.uuid4().hex}")
        part.write_text(text)
        os.replace(part, self._file)


def _table(node: dict[str, Any], name: str) -> dict[str, Any]:
    found = node.get(name)
    return found if isinstance(found, dict) else {}
