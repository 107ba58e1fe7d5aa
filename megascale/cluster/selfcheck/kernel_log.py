"""What the kernel said lately that makes a node unfit: rules over the records of /dev/kmsg.

A record is `priority,sequence,microseconds,flags;text`; the time is since boot. Only messages of
the last hour count: what a reboot, a reset or a new cable mended must not condemn the node for the
rest of its days.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RECENT_S = 3600.0


@dataclass(frozen=True)
class Rule:
    """pattern  searched in the text; fatal: the node fails, else it is a note"""

    name: str
    pattern: str
    fatal: bool = True


# Xid numbers after which NVIDIA's catalogue asks for a reset, a reboot or a repair. The others
# (13, 31, 43, 45: an illegal access or an ended process) are the program's doing.
_FATAL_XID = "46|48|62|64|74|79|95|110|119|120|140|142|143"

RULES = (
    Rule("gpu_xid", rf"NVRM: Xid \(.*?\): (?:{_FATAL_XID})\b"),
    Rule("gpu_lost", r"NVRM:.*(?:fallen off the bus|GPU has been lost)"),
    Rule("machine_check", r"\[Hardware Error\]|mce: .*Machine Check"),
    Rule("memory_uncorrected", r"EDAC .*\bUE\b|Memory failure: 0x"),
    Rule("pcie_fatal", r"AER: .*Uncorrected \(Fatal\)|pcieport .*device recovery failed"),
    Rule("disk", r"I/O error, dev|EXT4-fs error|XFS .*(?:Corruption|metadata I/O error)"),
    Rule("read_only", r"Remounting filesystem read-only"),
    Rule("nic", r"mlx5_core .*(?:health compromised|fatal|device's health)"),
    Rule("lockup", r"watchdog: BUG: (?:soft|hard) lockup|Watchdog detected hard LOCKUP"),
    Rule("kernel_bug", r"kernel BUG at|Kernel panic|general protection fault.*\[#"),
    Rule("gpu_xid_other", r"NVRM: Xid \(", fatal=False),
    Rule("hung_task", r"INFO: task .* blocked for more than", fatal=False),
    Rule("out_of_memory", r"Out of memory: Killed process|oom-kill:", fatal=False),
    Rule("link_down", r"(?:Link down|NIC Link is Down|Port: \d+ Link DOWN)", fatal=False),
    Rule("throttled", r"temperature above threshold, cpu clock throttled", fatal=False),
)


@dataclass(frozen=True)
class Match:
    """rule  the first that fits; count: of records in the window; line: the newest of them"""

    rule: str
    fatal: bool
    count: int
    line: str


def read_records(path: Path) -> list[str]:
    """All records there are now. OSError where they may not be read."""
    records: list[str] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return records
            except BrokenPipeError:
                continue  # the record was overwritten while it was read
            if not data:
                return records  # a plain file: for tests
            records += data.decode(errors="replace").splitlines()
    finally:
        os.close(descriptor)


def match_records(
    records: Iterable[str], now_s: float, rules: tuple[Rule, ...] = RULES
) -> list[Match]:
    """Recent records by rule. now_s: seconds since boot."""
    found: dict[str, Match] = {}
    for record in records:
        head, _, text = record.partition(";")
        parts = head.split(",")
        if len(parts) < 3 or not parts[2].isdigit():  # a continuation line
            continue
        if now_s - int(parts[2]) / 1e6 > RECENT_S:
            continue
        rule = next((rule for rule in rules if re.search(rule.pattern, text)), None)
        if rule is not None:
            count = found[rule.name].count + 1 if rule.name in found else 1
            found[rule.name] = Match(rule.name, rule.fatal, count, text[:300])
    return list(found.values())


def seconds_since_boot() -> float:
    """The clock of the records: it stands while the machine sleeps, as the kernel's does."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
