"""A pool of warm processes with stand-ins for what they run, by a clock that a test moves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.cluster.agent import warm as pool
from megascale.cluster.agent.ledger import PAGE_VARIABLE
from megascale.cluster.agent.progress import make_page
from megascale.cluster.agent.rank_process import RankStatus
from megascale.cluster.agent.warm import WarmRanks
from megascale.events import ProgressWriter

STANDS_IN = """
import os, sys, time
while os.path.exists(__file__ + ".slow"):
    time.sleep(0.01)
try:
    os.write(int(sys.argv[1]), b"r")
except BrokenPipeError:
    pass
line = sys.stdin.readline()
if line:
    with open(__file__ + ".told", "w") as file:
        file.write(line)
    time.sleep(600)
"""
TEMPLATE = """
import os, sys, threading, time
from megascale.train import template, warm
why_not, looks = template.why_not, []
def later():
    looks.append(1)
    if len(looks) > 1 and os.path.exists(__file__ + ".later"):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return why_not()
template.why_not = later
warm.import_all = lambda _: time.sleep(0.2)
template.MORE = sys.argv[2:] = ()
if THREAD:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
template.main()
"""
BASE = {"PATH": os.environ["PATH"], "COLOUR": "red"}


class Pool:
    """A pool whose processes are the stand-in, by a clock that a test moves."""

    def __init__(self, folder: Path, *, forks: bool = False) -> None:
        self.program = folder / "stand_in.py"
        self.program.write_text(STANDS_IN)
        self.changes = 0
        self.taken: list[Any] = []
        self.pages = folder / "pages"
        self.statuses: list[RankStatus] = []
        self.checks = False
        self.warm = WarmRanks(BASE, self.pages, folder, self._changed)
        self.warm._forks = forks
        self.log = folder / "rank.log"

    def _changed(self) -> None:
        self.changes += 1

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.warm.members]

    def tick(self, later_s: float = 0.0) -> list[int]:
        self.warm.tick(time.monotonic() + later_s, self.statuses, checks=self.checks)
        return self.pids

    def until(self, look: Callable[[], Any]) -> None:
        give_up_s = time.monotonic() + 30.0
        while not look():
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
            self.tick()

    @property
    def are_ready(self) -> bool:
        processes = self.warm._warm.values()
        return bool(processes) and all(one.ready is None for one in processes)

    def take(self, local_rank: int = 0, **environment: str) -> int | None:
        """Pid of the process that becomes the rank."""
        self.warm.expect(max(1, local_rank + 1, len(self.pids)))
        wanted = {**BASE, "RANK": "7", PAGE_VARIABLE: "page", **environment}
        taken = self.warm.take(local_rank, wanted, ["train", "x.toml"], self.log)
        if taken is None:
            return None
        os.killpg(taken.pid, 0)  # it leads a group of its own
        self.taken.append(taken.process)
        return taken.pid

    def told(self) -> dict[str, Any]:
        file = Path(f"{self.program}.told")
        self.until(lambda: file.exists() and file.read_text().endswith("\n"))
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def three(one: Pool) -> list[int]:
    """Of two ranks and the self-check, once they are there."""
    one.until(lambda: len(one.warm._warm) == 3)
    return [one.warm._warm[key].pid for key in (0, 1, pool.CHECK)]


def running(folder: Path, rank: int, started_s: float) -> tuple[RankStatus, ProgressWriter]:
    page = folder / f"rank{rank:05d}-e1"
    make_page(page)
    status = RankStatus(
        rank, rank, 1, 1, epoch=1, state="running", started_s=started_s, page=str(page)
    )
    return status, ProgressWriter(page)
