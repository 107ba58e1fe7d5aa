"""From what a check measured to its verdict. Pure: outcomes in, `Check` out.

A speed fails where it is more than the tolerance below any of: the table's value, the run folder's,
and, with three devices of a kind or more, the median of the node's own.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megascale.cluster.selfcheck.check import Check
from megascale.cluster.selfcheck.expected import Expected
from megascale.cluster.selfcheck.process import Outcome

MOST_THROTTLED = 0.5  # of the periods of a CPU quota

Hashes = Callable[[str], Mapping[str, str]]


def unanswered(name: str, outcome: Outcome) -> Check:
    """The check of an outcome without a result: failed, whatever the cause."""
    return Check(name, False, outcome.seconds, outcome.reason)


def judge_host(outcome: Outcome) -> Check:
    if outcome.result is None:
        return unanswered("host", outcome)
    failures = outcome.result["failures"]
    return Check(
        "host",
        not failures,
        outcome.seconds,
        "; ".join(failures),
        float(len(failures)),
        "failures",
        0.0,
        outcome.result["notes"],
    )


def speed_key(check: str, rate: Mapping[str, Any]) -> str:
    return f"{check}/{rate['class']}/{rate['kind']}"


def judge_speeds(
    name: str,
    outcome: Outcome,
    expected: Expected,
    learned: Callable[[str], float | None],
    *,
    factor: float = 1.0,
    tolerance: str | None = None,
) -> Check:
    """rates of the result: at (device), class, kind, value, where known expected; unit: of all.

    factor     every value is multiplied by it (a fault on purpose)
    tolerance  its name in the table; the check's own by default
    """
    if outcome.result is None:
        return unanswered(name, outcome)
    rates: list[dict[str, Any]] = [
        {**rate, "value": rate["value"] * factor} for rate in outcome.result["rates"]
    ]
    least = 1.0 - expected.tolerance[tolerance or name]
    worst: tuple[float, Mapping[str, Any], float | None] | None = None
    slow, detail = [], {}
    for rate in rates:
        detail[rate["at"]] = round(rate["value"], 2)
        bars = _bars(name, rate, rates, expected, learned)
        bar, origin = max(bars, default=(None, ""), key=lambda found: found[0])
        share = rate["value"] / bar if bar else float("inf")
        if worst is None or share < worst[0]:
            worst = (share, rate, bar)
        if bar and share < least:
            unit = rate.get("unit", outcome.result["unit"])
            slow.append(f"{rate['at']} {rate['value']:.4g} {unit}, {origin} {bar:.4g}")
    if worst is None:
        return Check(name, False, outcome.seconds, "nothing was measured")
    _, slowest, bar = worst
    unit = slowest.get("unit", outcome.result["unit"])
    reason = f"slower by more than {1 - least:.0%}: " + "; ".join(slow) if slow else ""
    throttled = outcome.result.get("throttled_share", 0.0)
    if throttled > MOST_THROTTLED:
        reason = f"a CPU quota stopped it in {throttled:.0%} of its periods; {reason}".rstrip("; ")
    return Check(
        name,
        not reason,
        outcome.seconds,
        reason,
        slowest["value"],
        unit,
        bar,
        detail,
        speed_only=bool(reason),
    )


def _bars(
    name: str,
    rate: Mapping[str, Any],
    rates: Sequence[Mapping[str, Any]],
    expected: Expected,
    learned: Callable[[str], float | None],
) -> list[tuple[float, str]]:
    """What this rate is compared with, and where that comes from."""
    bars = []
    if line := rate.get("expected"):
        bars.append((line, "the line has"))
    if table := expected.speed(rate["kind"], rate["class"]):
        bars.append((table, "the table has"))
    if known := learned(speed_key(name, rate)):
        bars.append((known, "the run folder has"))
    alike = [r["value"] for r in rates if speed_key(name, r) == speed_key(name, rate)]
    if len(alike) >= 3:
        bars.append((statistics.median(alike), "the median here is"))
    return bars


def merge_speeds(first: Outcome, second: Outcome) -> Outcome:
    """The better of two tries, device by device; a slow spell beside the check is forgiven once."""
    if first.result is None or second.result is None:
        return second
    best = {rate["at"]: rate for rate in first.result["rates"]}
    rates = []
    for rate in second.result["rates"]:
        other = best.get(rate["at"], rate)
        rates.append(rate if rate["value"] >= other["value"] else other)
    return Outcome(first.seconds + second.seconds, {**second.result, "rates": rates})


def judge_replay(outcome: Outcome, hashes_of: Hashes) -> Check:
    """A device fails that gives two results, or another one than most of its kind.

    hashes_of  other nodes' hashes by kind of device
    """
    if outcome.result is None:
        return unanswered("replay", outcome)
    found = outcome.result["hashes"]
    corrupt: dict[str, str] = {}
    for device in found:
        first, second = device["runs"]
        if first != second:
            corrupt[device["at"]] = f"{device['at']} gave two results for the same input"
    for kind in {device["kind"] for device in found}:
        own = {d["at"]: d["runs"][0] for d in found if d["kind"] == kind and d["at"] not in corrupt}
        others = {f"node {node}": digest for node, digest in hashes_of(kind).items()}
        for place in _outvoted({**others, **own}):
            if place in own:
                corrupt[place] = f"{place} gave another result than others of its kind ({kind})"
    detail = {device["at"]: device["runs"][0][:16] for device in found}
    return Check(
        "replay",
        not corrupt,
        outcome.seconds,
        "silent corruption: " + "; ".join(corrupt.values()) if corrupt else "",
        float(len(found) - len(corrupt)),
        "devices right",
        float(len(found)),
        detail,
    )


def _outvoted(digests: Mapping[str, str]) -> list[str]:
    """Who is not with the majority; without a majority, everybody: none can be told right."""
    counts = Counter(digests.values())
    most, count = counts.most_common(1)[0] if counts else ("", 0)
    if 2 * count <= len(digests):
        return list(digests)
    return [place for place, digest in digests.items() if digest != most]
