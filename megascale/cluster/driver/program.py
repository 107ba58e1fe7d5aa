"""What the ranks run: `megascale train` with a recipe, or somebody else's script.

The agents start it under torchrun's variables. A later epoch resumes what the run folder holds;
before a roll-back the newest checkpoints are set aside under another name, so that the trainer
finds the one before. Nothing is deleted.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale.cluster.actions import StartEpoch
from megascale.cluster.job import JobState
from megascale.cluster.messages import RankPlace, StartRanks
from megascale.env import RESUME, START

Groups = Mapping[str, Sequence[tuple[int, ...]]]
ASIDE = "aside-"
_log = logging.getLogger(__name__)


def world_only(world_size: int) -> Groups:
    """Of a program whose layout nobody knows."""
    return {"world": [tuple(range(world_size))]}


@dataclass(frozen=True)
class Program:
    """arguments  of `megascale train` without --resume and later overrides; or of the script
    argv       the program itself; None: `python -m megascale` of the agent's interpreter
    groups     parallel groups by name for a world size, which localise a hang
    """

    run_dir: Path
    arguments: tuple[str, ...]
    argv: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    groups: Callable[[int], Groups] = world_only

    def orders(
        self, action: StartEpoch, job: JobState, master_port: int
    ) -> list[tuple[str, StartRanks]]:
        """A node's start command for each place."""
        first = job.nodes[action.places[0].node]
        procs = job.policy.procs_per_node
        world_size = procs * len(action.places)
        arguments = [*self.arguments, *self._later(action)]
        environment = {**self.environment, START: f"{action.epoch}-{uuid.uuid4().hex}"}
        if action.back or action.newest_step is not None:  # memory is newer than what is wanted
            environment[RESUME] = "disk"
        return [
            (
                place.node,
                StartRanks(
                    ranks=[
                        RankPlace(rank=place.node_rank * procs + local, local_rank=local)
                        for local in range(procs)
                    ],
                    world_size=world_size,
                    local_world_size=procs,
                    master_addr=first.ip,
                    master_port=master_port,
                    arguments=arguments,
                    program=None if self.argv is None else list(self.argv),
                    environment=environment,
                    run_dir=str(self.run_dir),
                ),
            )
            for place in action.places
        ]

    def _later(self, action: StartEpoch) -> list[str]:
        if self.argv is not None:
            return []
        overrides = [word for override in action.overrides for word in ("--set", override)]
        holds_run = (self.run_dir / "config.json").exists()
        return [*overrides, *(["--resume"] if action.resume and holds_run else [])]

    def roll_back(self, back: int, newest_step: int | None) -> list[str]:
        """Set the `back` newest checkpoints aside, and those after `newest_step`; their names.

        The last one that is left stays: without any, the trainer would refuse to go on.
        """
        committed = _committed(self.run_dir / "checkpoints")
        chosen = committed[:back]
        if newest_step is not None:
            chosen += [one for one in committed[back:] if _step(one) > newest_step]
        if chosen and len(chosen) == len(committed):
            *chosen, oldest = chosen
            _log.warning(
                "checkpoint %s is the oldest that is left, so it is used though an earlier one is "
                "wanted; checkpoint.keep_latest_k says how many are kept",
                oldest.name,
            )
        for path in chosen:
            path.rename(path.with_name(ASIDE + path.name))
            _log.warning("checkpoint %s is set aside as %s%s", path.name, ASIDE, path.name)
        return [path.name for path in chosen]


def _committed(folder: Path) -> list[Path]:
    """Newest commit first: by the number in the mark, as `checkpoint/manifest.py` writes it."""
    found = []
    for mark in folder.glob("step-*/COMMITTED"):
        try:
            found.append((int(json.loads(mark.read_text())["number"]), mark.parent))
        except (ValueError, KeyError, TypeError, OSError):
            continue
    return [path for _, path in sorted(found, reverse=True)]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])
