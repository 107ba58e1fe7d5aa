"""Ports of a node and their counters, from sysfs under any root: read thousands of times a second.

Files are opened once and read in place with `pread`: 1 to 5 us a counter. So a tree that stands in
for sysfs must be written in place, not replaced. Marks of congestion are many files and grow
slowly; they are read every MARKS_EVERY-th time.

| port | bytes | speed | marks of congestion |
|---|---|---|---|
| `eth0` | statistics/rx_bytes, tx_bytes | speed, Mbit/s | packets that were dropped |
| `mlx5_0/1` | port_rcv_data, port_xmit_data, in words of 4 bytes | rate | ECN marks, congestion \
notices (CNP), discards, time that a send waited for credits |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

MARKS_EVERY = 10
_LOOPBACK = "lo"
_NET_MARKS = ("rx_dropped", "tx_dropped", "rx_missed_errors")
_RDMA_MARKS = (
    "counters/port_xmit_discards",
    "counters/port_xmit_wait",
    "hw_counters/np_ecn_marked_roce_packets",
    "hw_counters/np_cnp_sent",
    "hw_counters/rp_cnp_handled",
    "hw_counters/out_of_buffer",
)
_WORD_BYTES = 4
_DIGITS = 32  # of a counter, at most


class Source(Protocol):
    """Something with counters. `marks` None: it counts no congestion."""

    name: str
    speed_bytes_per_s: float | None

    def bytes_moved(self) -> tuple[int, int]:
        """(sent, received) so far. OSError: it is gone."""

    def marks(self) -> int | None: ...

    def close(self) -> None: ...


@dataclass
class SysfsPort:
    """A port whose counters are files, kept open."""

    name: str
    speed_bytes_per_s: float | None
    sent: int  # descriptors
    received: int
    unit_bytes: int = 1
    mark_files: Sequence[int] = field(default_factory=tuple)

    def bytes_moved(self) -> tuple[int, int]:
        return _number(self.sent) * self.unit_bytes, _number(self.received) * self.unit_bytes

    def marks(self) -> int | None:
        return sum(map(_number, self.mark_files)) if self.mark_files else None

    def close(self) -> None:
        for descriptor in (self.sent, self.received, *self.mark_files):
            os.close(descriptor)


def sysfs_ports(root: Path, names: Sequence[str] = ()) -> list[SysfsPort]:
    """The ports under `root` (/sys), by name; `names`: patterns of those that are wanted. Without
    them loopback is left out."""
    found = [*_interfaces(root / "class" / "net"), *_rdma_ports(root / "class" / "infiniband")]
    wanted = []
    for port in found:
        fits = any(fnmatch(port.name, name) for name in names)
        if fits or (not names and port.name != _LOOPBACK):
            wanted.append(port)
        else:
            port.close()
    return wanted


def _interfaces(folder: Path) -> Iterable[SysfsPort]:
    for one in _folders(folder):
        counters = one / "statistics"
        ends = _open_all([counters / "tx_bytes", counters / "rx_bytes"])
        if ends is None:
            continue
        megabits = _text(one / "speed")
        speed = int(megabits) * 125_000.0 if megabits.isdigit() and int(megabits) > 0 else None
        marks = _open_those([counters / name for name in _NET_MARKS])
        yield SysfsPort(one.name, speed, ends[0], ends[1], mark_files=marks)


def _rdma_ports(folder: Path) -> Iterable[SysfsPort]:
    for device in _folders(folder):
        for port in _folders(device / "ports"):
            counters = port / "counters"
            ends = _open_all([counters / "port_xmit_data", counters / "port_rcv_data"])
            if ends is None:
                continue
            rate = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
            speed = float(rate[1]) * 125e6 if rate else None
            marks = _open_those([port / name for name in _RDMA_MARKS])
            name = f"{device.name}/{port.name}"
            yield SysfsPort(name, speed, ends[0], ends[1], _WORD_BYTES, marks)


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(child for child in parent.iterdir() if child.is_dir())
    except OSError:
        return []


def _open_all(paths: Sequence[Path]) -> list[int] | None:
    """Descriptors of all files that can be read; None unless all can."""
    found = _open_those(paths)
    if len(found) == len(paths):
        return found
    for descriptor in found:
        os.close(descriptor)
    return None


def _open_those(paths: Sequence[Path]) -> list[int]:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                _number(descriptor)
            except (OSError, ValueError):
                os.close(descriptor)
                raise
            found.append(descriptor)
    return found


def _number(descriptor: int) -> int:
    return int(os.pread(descriptor, _DIGITS, 0) or 0)


def _text(path: Path) -> str:
    """The file's text; empty where it cannot be read, as with the speed of a link that is down."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
