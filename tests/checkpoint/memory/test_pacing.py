"""A copy goes in the idle time of a network, chunk by chunk, and is never late without bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.checkpoint.memory.pacing import Pacer, PageSignal
from megascale.events import PHASES, Issued, ProgressWriter


class _Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_chunks_go_when_the_network_is_idle() -> None:
    """Steps of 1 s whose last 0.3 s are busy; a chunk takes 40 ms."""
    clock = _Clock()

    def is_busy() -> bool:
        return clock.now_s % 1.0 >= 0.7

    pacer = Pacer(is_busy, most_s=60.0, clock=clock, sleep=clock.sleep)
    pacer.start()
    for _ in range(100):
        pacer.wait()
        assert not is_busy(), clock.now_s
        clock.now_s += 0.04
    # 4 s of sending at 18 chunks (the last begins at 0.68) in each step, which ends at 0.72 + 0.28
    assert pacer.waited_s == pytest.approx(5 * 0.28, abs=0.03)


def test_a_network_that_is_always_busy_delays_a_copy_by_the_bound_alone() -> None:
    clock = _Clock()
    pacer = Pacer(lambda: True, most_s=5.0, clock=clock, sleep=clock.sleep)
    for _ in range(2):  # each copy has the bound anew
        since = clock.now_s
        pacer.start()
        for _ in range(1000):
            pacer.wait()
        assert clock.now_s - since == pytest.approx(5.0, abs=0.01)


def test_the_end_of_a_step_is_busy(tmp_path: Path) -> None:
    page = tmp_path / "page"
    writer = ProgressWriter(page)
    signal = PageSignal(page)
    assert not signal(), "nothing was issued yet"
    busy = set()
    for phase in PHASES:
        writer.issued(Issued(epoch=1, step=3, phase=phase, monotonic_ns=1))
        if signal():
            busy.add(phase)
    assert busy == {"grad_sync", "optimizer", "param_gather"}
    writer.close()
