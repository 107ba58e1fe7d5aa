"""Ports that are set otherwise than the others, and links that flap (MegaScale 4.2, 6.3).

Congestion control (ECN), pause frames (PFC), queues (QoS), retransmission and speed must be alike
on all nodes; one node that differs slows everybody, and nothing fails.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from megascale.telemetry.diagnose.finding import Finding

FLAPS = 2  # in WITHIN_S: certain (ByteRobust evicts at the second network alert in 5 minutes)
WITHIN_S = 300.0

Settings = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Text by node, port and setting."""
_LIGHT = re.compile(r"(.*/)?hwmon/hwmon\d+/(?P<what>power\d*)_input")
RanksOf = Mapping[str, Sequence[int]]
"""Global ranks of each node."""


def differing_settings(settings: Settings, ranks_of: RanksOf) -> Finding | None:
    """Nodes where a setting of a port is not what more than half of all nodes have there.

    The optics' light is among them and no setting: `nic_health.py` compares it. A setting that a
    node does not have counts as None.
    """
    values: dict[tuple[str, str], dict[str, str | None]] = defaultdict(dict)
    keys = {(port, key) for ports in settings.values() for port, of in ports.items() for key in of}
    for port, key in sorted(keys):
        if light_of(key) is not None:
            continue
        for node, ports in settings.items():
            if port in ports:
                values[port, key][node] = ports[port].get(key)
    different: dict[str, dict[str, list[str | None]]] = defaultdict(dict)
    for (port, key), by_node in values.items():
        common, count = Counter(by_node.values()).most_common(1)[0]
        if 2 * count <= len(by_node):
            continue
        for node, value in by_node.items():
            if value != common:
                different[node][f"{port} {key}"] = [value, common]
    if not different:
        return None
    return Finding(
        kind="nic_settings",
        ranks=_ranks(different, ranks_of),
        evidence={"got_and_usual": {node: dict(of) for node, of in sorted(different.items())}},
    )


def light_of(setting: str) -> str | None:
    """The name of a measurement of light without the number that the kernel gave its sensor, such
    as "power1" of "device/hwmon/hwmon4/power1_input"; None for a setting."""
    found = _LIGHT.fullmatch(setting)
    return found["what"] if found else None


def flapping_links(
    flaps: Mapping[tuple[str, str], Sequence[tuple[float, int]]], ranks_of: RanksOf, now_s: float
) -> list[Finding]:
    """Links that went down lately: an alert at the first time, certain at FLAPS in WITHIN_S.

    flaps  by (node, port): (time, transitions down since the agent started), in order of time
    """
    found: dict[bool, dict[tuple[str, str], int]] = {True: {}, False: {}}
    for port, history in flaps.items():
        times = _transitions(history)
        recent = sum(count for at_s, count in times if now_s - at_s <= WITHIN_S)
        if recent:
            found[recent >= FLAPS][port] = recent
    return [
        Finding(
            kind="link_flap",
            ranks=_ranks({node for node, _ in ports}, ranks_of),
            evidence={
                "flaps": {f"{node}/{port}": count for (node, port), count in sorted(ports.items())},
                "within_s": WITHIN_S,
            },
            certain=certain,
        )
        for certain, ports in found.items()
        if ports
    ]


def _transitions(history: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """(time, how many) new transitions; a count that falls is of an agent that started anew."""
    found, last = [], 0
    for at_s, count in history:
        new = count - last if count >= last else count
        if new:
            found.append((at_s, new))
        last = count
    return found


def _ranks(nodes: Mapping[str, object] | set[str], ranks_of: RanksOf) -> tuple[int, ...]:
    return tuple(sorted({rank for node in nodes for rank in ranks_of.get(node, ())}))
