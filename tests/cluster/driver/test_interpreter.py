"""What the driver changes of its interpreter, and that it is changed back."""

from __future__ import annotations

import gc
import sys
import time

import pytest

from megascale.cluster.driver import interpreter


def test_no_pass_of_the_collector_but_one_in_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: passes.append(1))
    switch_s, now_s = sys.getswitchinterval(), time.monotonic()
    with interpreter.answering() as look:
        assert not gc.isenabled()
        assert sys.getswitchinterval() == pytest.approx(interpreter.SWITCH_S)
        look(now_s + interpreter.COLLECT_S - 5)
        assert not passes
        look(now_s + interpreter.COLLECT_S + 5)
        look(now_s + interpreter.COLLECT_S + 6)
        assert len(passes) == 1
    assert gc.isenabled()
    assert sys.getswitchinterval() == pytest.approx(switch_s)
