"""`megascale selfcheck`: the checks of this node, for people and for scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megascale import env
from megascale.cluster.selfcheck import plan
from megascale.cluster.selfcheck.expected import load_expected
from megascale.cluster.selfcheck.pairs import parse_meeting
from megascale.cluster.selfcheck.run import run_node_checks

VERDICTS = {True: "passed", False: "FAILED", None: "does not apply"}


def selfcheck(
    level: str,
    deadline_s: float,
    run_dir: Path,
    expected: Path | None,
    peers: Sequence[str],
    as_json: bool,
    write: Callable[[str], None] = print,
) -> int:
    """Run and show them. 0 where the node is fit and every meeting was right, else 1.

    Raises ConfigError or LaunchError for what cannot be asked, before anything starts.
    """
    plan.names(level)
    plan.check_faults(env.selfcheck_faults())
    load_expected(expected)
    for peer in peers:
        parse_meeting(peer)
    report = run_node_checks(level, deadline_s, run_dir, expected, peers)
    write(json.dumps(report) if as_json else "\n".join(table(report)))
    return 0 if report["ok"] and all(report["pairs"].values()) else 1


def table(report: dict[str, Any]) -> list[str]:
    """A line a check, and what came of all."""
    rows = [[check["name"], VERDICTS[check["ok"]], _figure(check)] for check in report["checks"]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for check, row in zip(report["checks"], rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"{'  '.join(cells)}  {check['seconds']:5.1f} s  {check['reason']}".rstrip())
    verdict = "fit" if report["ok"] else "NOT fit"
    lines.append(f"{report['node']} is {verdict} ({report['level']}, {report['seconds']:.1f} s)")
    if "note" in report:
        lines.append(f"note: {report['note']}")
    return lines


def _figure(check: dict[str, Any]) -> str:
    if check["value"] is None:
        return ""
    against = "" if check["expected"] is None else f" of {check['expected']:g}"
    return f"{check['value']:g}{against} {check['unit']}"
