"""Ports that err more than the others, or whose optics have less light (MegaScale 4.2, 6.3).

A port with a dirty or dying transceiver works: it corrects, retransmits, and slows everybody. Its
counters and its light show it before the link goes down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.nic_settings import RanksOf, Settings, light_of

ERRORS = frozenset(
    {
        *("symbol_error", "link_error_recovery", "local_link_integrity_errors"),
        *("port_rcv_errors", "rx_crc_errors", "rx_errors", "tx_errors", "tx_carrier_errors"),
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err"),
        *("roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart"),
    }
)
"""Counters that grow where something is wrong; congestion makes some of them grow everywhere."""

LEAST_ERRORS = 20  # in the time that is looked at
TIMES = 10.0  # what the others have
LEAST_NODES = 3
DARK = 0.5  # of the others' light: 3 dB less

Growth = Mapping[str, Mapping[str, Mapping[str, int]]]
"""By how much each counter grew, by node, port and counter."""


def erring_ports(growth: Growth, ranks_of: RanksOf) -> Finding | None:
    """Ports with LEAST_ERRORS or more of a kind, and TIMES as many as the median of the ports of
    that name on other nodes. growth: of equal times."""
    by_counter: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for node, ports in growth.items():
        for port, counters in ports.items():
            for counter in counters.keys() & ERRORS:
                by_counter[port, counter][node] = counters[counter]
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (port, counter), by_node in sorted(by_counter.items()):
        for node, count in by_node.items():
            others = _others(by_node, node)
            if others is not None and count >= max(LEAST_ERRORS, TIMES * others):
                found[node][f"{port} {counter}"] = [count, others]
    return _finding("nic_errors", found, ranks_of)


def dark_optics(settings: Settings, ranks_of: RanksOf) -> Finding | None:
    """Ports whose light is less than DARK of the median of the ports of that name on other nodes.

    settings  as for `differing_settings`: light is in them, in microwatts
    """
    by_sensor: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for node, ports in settings.items():
        for port, of in ports.items():
            for key, text in of.items():
                what = light_of(key)
                if what is not None and text.isdigit():
                    by_sensor[port, what][node] = float(text)
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (port, what), by_node in sorted(by_sensor.items()):
        for node, light in by_node.items():
            others = _others(by_node, node)
            if others is not None and light < DARK * others:
                found[node][f"{port} {what}"] = [light, others]
    return _finding("nic_light", found, ranks_of)


def _others(by_node: Mapping[str, float], node: str) -> float | None:
    """The median of the other nodes; None where they are too few to say what is usual."""
    others = [value for other, value in by_node.items() if other != node]
    return float(median(others)) if len(others) >= LEAST_NODES - 1 else None


def _finding(
    kind: str, found: Mapping[str, Mapping[str, list[float]]], ranks_of: RanksOf
) -> Finding | None:
    if not found:
        return None
    ranks = tuple(sorted({rank for node in found for rank in ranks_of.get(node, ())}))
    told = {node: dict(of) for node, of in sorted(found.items())}
    return Finding(kind, ranks, {"got_and_usual": told}, certain=False)
