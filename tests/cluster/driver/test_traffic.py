"""Bytes a step are compared over epochs, as long as a step is the same."""

from __future__ import annotations

from collections.abc import Hashable

from megascale.cluster.driver.traffic import ROW_S, Traffic
from megascale.cluster.messages import NicReport
from megascale.telemetry.diagnose.finding import Finding

RANKS_OF = {"n0": [0, 1], "n1": [2, 3]}


class Epochs:
    """Rows of epochs of two nodes of a port each, a step a second."""

    def __init__(self) -> None:
        self.traffic, self.now_s, self.step = Traffic(), 0.0, 0
        self.bytes = dict.fromkeys(RANKS_OF, 0)

    def train(self, of: Hashable, rows: int, **bytes_a_step: int) -> list[Finding]:
        self.traffic.begin(of)
        found: list[Finding] = []
        for _ in range(rows + 1):  # the first is what the next is compared with
            for node, more in bytes_a_step.items():
                self.bytes[node] += more * int(ROW_S)
                counters = {"port_xmit_data": self.bytes[node]}
                nic = NicReport(name="mlx5_0/1", up=True, counters=counters)
                self.traffic.add(node, [nic], self.now_s)
            found += self.traffic.changes(
                {node: RANKS_OF[node] for node in bytes_a_step}, self.now_s, self.step, 100
            )
            self.now_s, self.step = self.now_s + ROW_S, self.step + int(ROW_S)
        return found


def test_a_fall_is_seen_over_a_restart() -> None:
    epochs = Epochs()
    assert epochs.train((4, ()), 30, n0=1000, n1=1000) == []
    found = epochs.train((4, ()), 10, n0=1000, n1=400)
    assert [(one.kind, one.ranks, one.certain) for one in found] == [
        ("traffic_fell", (2, 3), False),
        ("traffic_fell", (2, 3), True),
    ]


def test_fewer_nodes_or_another_batch_are_no_fall() -> None:
    epochs = Epochs()
    assert epochs.train((4, ()), 30, n0=1000, n1=1000) == []
    assert epochs.train((2, ()), 30, n0=400) == []
    assert epochs.train((2, ("training.global_batch_size=4",)), 30, n0=150) == []


def test_an_epoch_brings_no_row_without_bytes() -> None:
    """Restarts in a row would push out what is usual."""
    epochs = Epochs()
    epochs.train((4, ()), 30, n0=1000, n1=1000)
    for _ in range(60):
        epochs.train((4, ()), 0, n0=1000, n1=1000)
    assert epochs.train((4, ()), 10, n0=1000, n1=400), "still known"
