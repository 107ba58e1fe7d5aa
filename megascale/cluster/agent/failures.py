"""Why a rank ended, and which rank of the node ended first. Pure.

Sources in this order: the error that the rank recorded itself, the kernel's out-of-memory killer,
a rule that its log matched, its signal or exit code with the last line of its log.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megascale.cluster.agent.log_reader import Match
from megascale.cluster.agent.log_rules import MOST_LINE, classify
from megascale.cluster.messages import TEXT, Failure

CASCADE_S = 5.0  # within it, what peers see of a failure may carry an earlier time than its cause
RECENT_S = 30.0  # before its end: what a log said earlier did not end the rank
_SECOND_HAND = frozenset({"network"})
_KIND_OF_EXIT = {5: "launch", 6: "numerical"}  # of errors.py; every other is an exception


@dataclass(frozen=True)
class Recorded:
    """An error file: what a rank said of its own end."""

    unix_ns: int
    message: str
    exit_code: int

    @classmethod
    def parse(cls, text: str) -> Recorded | None:
        """None for a file that was cut short."""
        try:
            entry = json.loads(text)
            return cls(int(entry["time_ns"]), str(entry["message"]), int(entry["exit_code"]))
        except (ValueError, KeyError, TypeError):
            return None


def of_record(recorded: Recorded, exit_code: int | None) -> Failure:
    """What the rank said itself; also while it still tries to end."""
    rule = classify(recorded.message[:MOST_LINE])
    kind = rule.kind if rule else _KIND_OF_EXIT.get(recorded.exit_code, "exception")
    return Failure(
        kind=kind,
        message=recorded.message[:TEXT],
        unix_ns=recorded.unix_ns,
        exit_code=exit_code,
        rule=rule.name if rule else None,
    )


def explain(
    exit_code: int | None,
    *,
    asked: bool,
    recorded: Recorded | None,
    out_of_memory: bool,
    matches: Sequence[Match],
    ended_ns: int,
    last_words: str = "",
) -> Failure | None:
    """The failure of a rank that has ended; None for one that ended well, or because it was asked.

    exit_code   negative: the signal; ended_ns: wall time
    last_words  last line of its log; a program that exits has said there why
    """
    if recorded is not None and exit_code != 0:
        return of_record(recorded, exit_code)
    if exit_code in (0, None) or asked:
        return None
    ended_by = _signal_name(-exit_code) if exit_code < 0 else None
    if out_of_memory and exit_code == -signal.SIGKILL:
        return Failure(
            kind="out_of_memory",
            message="the kernel ended it: the memory of the node or its cgroup was full",
            unix_ns=ended_ns,
            exit_code=exit_code,
            signal=ended_by,
            rule="kernel_out_of_memory",
        )
    recent = [m for m in matches if ended_ns - m.unix_ns <= RECENT_S * 1e9]
    if recent and exit_code != -signal.SIGKILL:  # no program has a word to say about that one
        first = min(recent, key=lambda m: (m.rule.kind in _SECOND_HAND, m.unix_ns))
        return Failure(
            kind=first.rule.kind,
            message=first.line[:TEXT],
            unix_ns=first.unix_ns,
            exit_code=exit_code,
            signal=ended_by,
            rule=first.rule.name,
        )
    how = f"ended by {ended_by}" if ended_by else f"exited {exit_code}"
    said = f", its log ends: {last_words}" if last_words and not ended_by else " without a word"
    return Failure(
        kind="signal" if ended_by else "exit",
        message=f"{how}{said}"[:TEXT],
        unix_ns=ended_ns,
        exit_code=exit_code,
        signal=ended_by,
    )


def first_failed(failures: Mapping[int, Failure]) -> int | None:
    """The rank that the others' failures follow from; None without failures.

    The earliest, unless it is one that a dying peer causes and another cause came soon after.
    """
    if not failures:
        return None
    earliest_ns = min(failure.unix_ns for failure in failures.values())
    near = {
        rank: failure
        for rank, failure in failures.items()
        if failure.unix_ns - earliest_ns <= CASCADE_S * 1e9
    }
    return min(near, key=lambda rank: (near[rank].kind in _SECOND_HAND, near[rank].unix_ns, rank))


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"
