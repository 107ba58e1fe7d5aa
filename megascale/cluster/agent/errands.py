"""Dumps and self-checks: beside everything else, each with a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megascale.cluster.agent.commands import Results
from megascale.cluster.agent.dump import dump
from megascale.cluster.agent.processes import Ranks
from megascale.cluster.agent.warm_process import Child
from megascale.cluster.messages import BODY_BYTES, Command, DumpStacks, RunSelfCheck

WARM_WAIT_S = 20.0
_TAIL = 500


@dataclass
class _Check:
    command: Command
    process: Child
    output: IO[bytes]
    give_up_s: float


@dataclass(frozen=True)
class _Asked:
    """A self-check that waits for its warm process, no longer than until `start_s`."""

    command: Command
    order: RunSelfCheck
    asked_s: float
    start_s: float


class Errands:
    """Main thread only; `tick` posts what has come to its end."""

    def __init__(
        self, run_dir: Path, ranks: Ranks, results: Results, check_margin_s: float
    ) -> None:
        self._run_dir, self._ranks, self._results = run_dir, ranks, results
        self._check_margin_s = check_margin_s
        self._checks: list[_Check] = []
        self._asked: list[_Asked] = []

    def dump(self, command: Command, order: DumpStacks) -> None:
        """In a thread: py-spy ends at its deadline, and nothing waits for it."""
        wanted = {
            status.rank: (status.pid, Path(status.run_dir or self._run_dir))
            for status in self._ranks.statuses
            if status.rank in order.ranks and status.ended_s is None
        }

        def work() -> None:
            detail = dump(wanted)
            for rank in set(order.ranks) - set(wanted):
                detail["missing"][str(rank)] = "does not run on this node"
            ok = bool(detail["stacks"]) or not order.ranks
            reason = (
                "" if ok else "no stacks: " + "; ".join(sorted(set(detail["missing"].values())))
            )
            self._results.put(command, ok=ok, reason=reason, detail=detail)

        threading.Thread(target=work, name=f"dump {command.sequence}", daemon=True).start()

    def self_check(self, command: Command, order: RunSelfCheck) -> None:
        """As a process in a session of its own, in a moment where a warm one is on its way."""
        now_s = time.monotonic()
        wait_s = min(WARM_WAIT_S, order.deadline_s / 3)
        self._asked.append(_Asked(command, order, now_s, now_s + wait_s))
        self._start_asked()

    def _start_asked(self) -> None:
        now_s, coming = time.monotonic(), self._ranks.warm.check_is_coming
        for asked in [one for one in self._asked if not coming or now_s >= one.start_s]:
            self._asked.remove(asked)
            order, left_s = asked.order, asked.order.deadline_s - (now_s - asked.asked_s)
            output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with the check
            arguments = [order.level, f"{left_s:.3f}", str(self._run_dir), *order.peers]
            try:
                process = self._ranks.start_check(arguments, Path(output.name))
            except OSError as error:
                output.close()
                reason = f"the self-check could not be started: {error}"
                self._results.put(asked.command, ok=False, reason=reason)
                continue
            give_up_s = now_s + left_s + self._check_margin_s
            self._checks.append(_Check(asked.command, process, output, give_up_s))

    def tick(self) -> None:
        """Start what waits; post the ended ones; kill those beyond their deadline, once, and give
        them up."""
        self._start_asked()
        for check in list(self._checks):
            has_ended = check.process.poll() is not None
            if not has_ended and time.monotonic() < check.give_up_s:
                continue
            self._checks.remove(check)
            if not has_ended:
                self._kill(check)
            self._post(check, has_ended=has_ended)

    def close(self) -> None:
        """End what still runs."""
        for check in self._checks:
            self._kill(check)
            check.output.close()
        self._checks.clear()
        self._asked.clear()

    def _kill(self, check: _Check) -> None:
        with suppress(ProcessLookupError):
            os.killpg(check.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            check.process.wait(0.5)

    def _post(self, check: _Check, *, has_ended: bool) -> None:
        self._ranks.helper_ended(check.process.pid)
        check.output.seek(0)
        output = check.output.read(BODY_BYTES)
        check.output.close()
        *before, last = [b"", *output.splitlines()]
        try:
            said = json.loads(last)
        except ValueError:
            said = {}
        if has_ended and "detail" in said:
            detail = said["detail"]
            self._results.put(check.command, ok=bool(detail.get("ok", True)), detail=detail)
            return
        tail = b"\n".join([*before, last])[-_TAIL:].decode(errors="replace")
        ending = f"exited {check.process.returncode}" if has_ended else "passed its deadline"
        reason = said.get("missing") or f"the self-check {ending}: {tail}"
        self._results.put(check.command, ok=False, reason=reason)
