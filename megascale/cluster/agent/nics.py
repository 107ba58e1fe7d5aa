"""State, counters and settings of network interfaces and RDMA ports, from sysfs under any root.

Counters are since boot, as the kernel has them. Settings are what decides whether RDMA over this
port works well at scale (MegaScale 3.6): ECN, PFC, trust, traffic class, adaptive retransmission,
rate, width, and the light of the optics; as text, where the tree has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megascale.cluster.messages import NicReport

MOST_NICS, MOST_COUNTERS, MOST_SETTINGS = 64, 64, 64
MOST_TEXT = 200
_NET_COUNTERS = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_crc_errors",
    "tx_carrier_errors",
)
_NET_SETTINGS = ("speed", "mtu", "duplex", "qos/*", "ecn/*/enable/*", "ecn/*/params/*")
_NET_LIGHT = "device/hwmon/hwmon*/power*_input"
# most telling first: a port has more counters than a message holds
_PORT_COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "port_xmit_discards",
    "port_xmit_wait",
    "port_rcv_data",
    "port_xmit_data",
)
_PORT_HARDWARE = (
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "rx_icrc_encapsulated",
)
_PORT_SETTINGS = ("rate", "phys_state", "link_layer", "gid_attrs/types/3", "sl2vl", "ext_phy/*")
_DEVICE_SETTINGS = ("fw_ver", "hca_type", "tc/*/traffic_class", "ttl/*/ttl", "cc/*", "roce_*")


@dataclass
class _History:
    was_up: bool
    flaps: int = 0
    down_since_s: float | None = None
    down_s: float = 0.0

    def see(self, up: bool, now_s: float) -> None:
        if self.was_up and not up:
            self.flaps += 1
            self.down_since_s, self.down_s = now_s, 0.0
        if self.down_since_s is not None:
            self.down_s = now_s - self.down_since_s
            if up:
                self.down_since_s = None
        self.was_up = up


class Nics:
    """All interfaces but loopback, and all ports; remembers how often each went down."""

    def __init__(self, root: Path) -> None:
        self._net, self._rdma = root / "class" / "net", root / "class" / "infiniband"
        self._history: dict[str, _History] = {}

    def read(self) -> list[NicReport]:
        """Each interface and port now, by name; a port is DEVICE/NUMBER."""
        now_s = time.monotonic()
        reports = [
            self._report(folder.name, _net_is_up(folder), now_s, _net(folder), _net_set(folder))
            for folder in _folders(self._net)
            if folder.name != "lo"
        ]
        for device in _folders(self._rdma):
            for port in _folders(device / "ports"):
                name = f"{device.name}/{port.name}"
                up = "ACTIVE" in (_text(port / "state") or "")
                settings = {
                    **_settings(port, _PORT_SETTINGS),
                    **_settings(device, _DEVICE_SETTINGS),
                }
                reports.append(self._report(name, up, now_s, _port(port), settings))
        return reports[:MOST_NICS]

    def _report(
        self,
        name: str,
        up: bool,
        now_s: float,
        counters: dict[str, int],
        settings: dict[str, str],
    ) -> NicReport:
        history = self._history.setdefault(name, _History(was_up=up))
        history.see(up, now_s)
        return NicReport(
            name=name,
            up=up,
            flaps=history.flaps,
            down_s=history.down_s,
            counters=dict(list(counters.items())[:MOST_COUNTERS]),
            settings=dict(list(settings.items())[:MOST_SETTINGS]),
        )


def _net_is_up(folder: Path) -> bool:
    """`unknown` is what virtual interfaces say that carry traffic."""
    return (_text(folder / "operstate") or "") in ("up", "unknown")


def _net(folder: Path) -> dict[str, int]:
    counters = _counters(folder / "statistics", _NET_COUNTERS)
    return {**counters, **_counters(folder, ("carrier_down_count",))}


def _net_set(folder: Path) -> dict[str, str]:
    return {**_settings(folder, _NET_SETTINGS), **_settings(folder, (_NET_LIGHT,))}


def _port(port: Path) -> dict[str, int]:
    counters = _counters(port / "counters", _PORT_COUNTERS)
    return {**counters, **_counters(port / "hw_counters", _PORT_HARDWARE)}


def _counters(folder: Path, names: Iterable[str]) -> dict[str, int]:
    found = {}
    for name in names:
        text = _text(folder / name)
        if text is not None and text.isdigit():
            found[name] = min(int(text), (1 << 63) - 1)
    return found


def _settings(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Texts of the files that match, by their path in `folder`."""
    found = {}
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            text = _text(file)
            if text is not None:
                found[str(file.relative_to(folder))] = text[:MOST_TEXT]
    return found


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(child for child in parent.iterdir() if child.is_dir())
    except OSError:
        return []


def _text(file: Path) -> str | None:
    """The file's words; None where it cannot be read, as with the speed of a link that is down."""
    try:
        return " ".join(file.read_bytes().decode(errors="replace").split())
    except OSError:
        return None
