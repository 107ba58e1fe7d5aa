"""Dumps and self-checks: beside everything else, each with a deadline."""

from __future__ import annotations

from pathlib import Path

from megascale.cluster.agent.commands import Results
from megascale.cluster.agent.processes import Ranks
from megascale.cluster.messages import Command, DumpStacks, RunSelfCheck


class Errands:
    """Main thread only; `tick` looks whether something has come to its end."""

    def __init__(self, run_dir: Path, ranks: Ranks, results: Results) -> None:
        self._run_dir, self._ranks, self._results = run_dir, ranks, results

    def dump(self, command: Command, order: DumpStacks) -> None:
        self._results.put(command, ok=False, reason=f"not available for ranks {order.ranks}")

    def self_check(self, command: Command, order: RunSelfCheck) -> None:
        self._results.put(command, ok=False, reason=f"{order.level} self-check: not available")

    def tick(self) -> None:
        """Post what has come to its end."""

    def close(self) -> None:
        """End what still runs."""
