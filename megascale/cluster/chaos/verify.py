"""After any faults: is everything as if there had been none? (a property, checked on real runs)

loss     every row of metrics.jsonl has the bits of the run without faults at that step
samples  steps 1, 2, 3, ... each counted once, and the same number of samples behind each
orphans  no process of the job is left, no port listens
pages    no shared memory is left, of whatever node (a real one that loses power has none)
closed   each incident has exactly one closing event
ledger   its kinds sum to the time booked, and that to the wall clock
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megascale.cluster.backends import processes
from megascale.cluster.chaos.observe import Journal
from megascale.cluster.ledger import KINDS

GONE_S = 5.0  # killed orphans may be zombies of pid 1 for a while
WALL_S = 5.0  # between the last booking and the last row
VALUES = ("loss", "grad_norm", "lr")
Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One property of one run. wrong: what was found; empty: it holds."""

    name: str
    wrong: tuple[str, ...] = ()
    told: str = ""

    @property
    def ok(self) -> bool:
        return not self.wrong


def verify(
    run_dir: Path,
    reference: Path | None,
    *,
    spoilt: Collection[int] = (),
    ports: Iterable[tuple[str, int]] = (),
) -> list[Check]:
    """All properties of a run that has ended.

    reference  run folder of the same configuration without faults; None: values are not compared
    spoilt     steps that a fault was ordered to compute wrong: only their last row must be right
    """
    journal = Journal(run_dir / "driver" / "journal.sqlite")
    journal.read()
    rows = read_metrics(run_dir)
    checks = [check_samples(rows)]
    if reference is not None:
        checks.insert(0, check_loss(rows, read_metrics(reference), spoilt))
    left = [check_orphans(run_dir, ports), check_pages(run_dir)]
    return [*checks, *left, check_closed(journal), check_ledger(journal)]


def read_metrics(run_dir: Path) -> list[Row]:
    """Rows of training steps, in the order of the file. A line that a death tore is passed over."""
    rows = []
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "loss" in row:
            rows.append(row)
    return rows


def lost_steps(rows: list[Row]) -> int | None:
    """Steps that were done twice, where the rows go back; None where they do not."""
    for before, after in pairwise(rows):
        if after["step"] <= before["step"]:
            return int(before["step"] - after["step"] + 1)
    return None


def check_loss(rows: list[Row], reference: list[Row], spoilt: Collection[int]) -> Check:
    """Bit for bit: both were written with the shortest text that reads back as the same number."""
    right = {row["step"]: [row.get(name) for name in VALUES] for row in reference}
    last = {row["step"]: number for number, row in enumerate(rows)}
    wrong, compared = [], 0
    for number, row in enumerate(rows):
        step = row["step"]
        if step not in right or (step in spoilt and last[step] != number):
            continue
        compared += 1
        got = [row.get(name) for name in VALUES]
        if got != right[step]:
            wrong.append(f"step {step}: {got}, without faults {right[step]}")
    if not compared:
        wrong.append("no step of the run is in the reference")
    return Check("loss", tuple(wrong[:5]), f"{compared} rows of {len(last)} steps, bit for bit")


def check_samples(rows: list[Row]) -> Check:
    last = {row["step"]: row["consumed_tokens"] for row in rows}
    steps = sorted(last)
    if not steps:
        return Check("samples", ("no step was recorded",))
    wrong = [f"step {a + 1} is missing" for a, b in pairwise(steps) if b != a + 1]
    if steps[0] != 1:
        wrong.append(f"the first step is {steps[0]}")
    each = last[steps[0]]
    wrong += [
        f"step {step}: {last[step]} tokens, must be {each * step}"
        for step in steps
        if last[step] != each * step
    ]
    return Check("samples", tuple(wrong[:5]), f"{len(steps)} steps, {last[steps[-1]]} tokens")


def check_orphans(run_dir: Path, ports: Iterable[tuple[str, int]]) -> Check:
    register = json.loads((run_dir / "backend" / "local.json").read_text())
    deadline_s = time.monotonic() + GONE_S
    while (left := processes.members(f"{register['job']}/")) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    wrong = [f"pid {pid} of {mark}" for mark, pids in left.items() for pid in pids]
    ports = sorted(ports)
    wrong += [f"{host}:{port} still listens" for host, port in ports if _listens(host, port)]
    nodes = {*register["machines"], *register["past"]}
    return Check("orphans", tuple(wrong[:10]), f"{len(nodes)} nodes, {len(ports)} ports")


def check_pages(run_dir: Path) -> Check:
    """Folders of progress pages that agents of the run have written down and not taken away."""
    records = sorted((run_dir / "agents").glob("*/processes.json"))
    found: list[Path] = []
    for record in records:
        pages = Path(json.loads(record.read_text())["pages"])
        found += pages.parent.glob(pages.name + "*")
    wrong = tuple(f"{page} is left" for page in found)
    return Check("pages", wrong, f"{len(records)} agents")


def check_closed(journal: Journal) -> Check:
    opened, closed = [], []
    for turn in journal.turns:
        opened += [action["incident"]["number"] for action in turn.did("Opened")]
        closed += [action["incident"]["number"] for action in turn.did("Closed")]
    wrong = [
        f"incident {number} was closed {closed.count(number)} times"
        for number in opened
        if closed.count(number) != 1
    ]
    wrong += [f"incident {number} was never opened" for number in {*closed} - {*opened}]
    return Check("closed", tuple(wrong), f"{len(opened)} incidents")


def check_ledger(journal: Journal) -> Check:
    job = journal.job
    if job is None or journal.began_unix_s is None or not journal.turns:
        return Check("ledger", ("there is no journal",))
    ledger = job.ledger
    kinds_ns = sum(getattr(ledger, f"{kind}_ns") for kind in KINDS)
    wall_s = journal.turns[-1].unix_s - journal.began_unix_s
    wrong = []
    if kinds_ns != ledger.wall_ns:
        wrong.append(f"the kinds sum to {kinds_ns} ns, booked were {ledger.wall_ns}")
    if abs(wall_s - ledger.wall_ns / 1e9) > WALL_S:
        wrong.append(f"booked {ledger.wall_ns / 1e9:.1f} s, the wall clock says {wall_s:.1f} s")
    told = ", ".join(f"{kind} {value:.1f}" for kind, value in ledger.seconds().items() if value)
    return Check("ledger", tuple(wrong), f"{told} s; ETTR {(ledger.ettr or 0.0):.3f}")


def _listens(host: str, port: int) -> bool:
    with socket.socket() as own:
        try:
            own.bind((host, 0))
        except OSError:
            return False  # the address went with its namespace; who answers there is not ours
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
