"""Who is asked what was seen: a row a detector of `telemetry/diagnose/`, once a second at most.

Detectors are pure; what they need from the heartbeats is put together here. Their modules are
imported at the first use, and one that is absent is passed over.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.program import Groups, Program
from megascale.cluster.job import JobState
from megascale.cluster.transitions import Event
from megascale.telemetry.diagnose.finding import Finding

_log = logging.getLogger(__name__)


@cache
def load(module: str, name: str) -> Callable[..., Any] | None:
    """A function of `telemetry/diagnose/MODULE.py`; None where there is none."""
    try:
        return getattr(importlib.import_module(f"megascale.telemetry.diagnose.{module}"), name)
    except (ImportError, AttributeError):
        _log.info("there is no detector %s.%s", module, name)
        return None


def localise_hang(
    digest: Digest,
    groups: Groups,
    stacks: Mapping[int, str],
    suspects: tuple[int, ...],
    now_s: float,
) -> Finding:
    """Who holds the others up; the suspects themselves where nothing tells them apart."""
    localise, view = load("hang", "localise"), load("hang", "RankView")
    if localise is None or view is None:
        return Finding("hang", suspects, {"rule": "past their deadline"}, certain=False)
    views = {}
    for rank, seen in digest.ranks.items():
        report, progress = seen.report, seen.report.progress
        known: dict[str, Any] = {
            "epoch": report.epoch,
            "age_s": seen.age_s(now_s),
            "os_state": report.os_state,
            "alive": report.state != "exited",
        }
        if progress is not None:
            known |= {
                "epoch": progress.epoch,
                "step": progress.step,
                "phase": progress.phase,
                "micro_batch": progress.micro_batch,
                "chunk": progress.chunk,
                "group_id": progress.group_id,
                "seq": progress.seq,
                "completed_step": progress.completed_step,
            }
        views[rank] = view(**known)
    finding: Finding = localise(views, groups, dict(stacks))
    return finding


class Detectors:
    """Remembers what was handed over already."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def look(self, digest: Digest, job: JobState) -> Iterator[Event]:
        yield from ()
