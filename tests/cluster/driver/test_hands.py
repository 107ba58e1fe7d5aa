"""What becomes of a backend that breaks: whoever waits for its answer gets one, people are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megascale.cluster.actions import EvictNode, Replenish
from megascale.cluster.backends.base import Machine, MachineEvent
from megascale.cluster.transitions import Allocated
from tests.cluster.driver.fakes import PaperBackend
from tests.cluster.driver.test_readoption import hands, until


class Broken(PaperBackend):
    """Raises what no backend should."""

    def replenish(
        self, count: int, *, exclude: Sequence[str] = (), near: Sequence[str] = ()
    ) -> list[Machine]:
        raise KeyError("node7")

    def watch(self) -> list[MachineEvent]:
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "no text")

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        raise RuntimeError("no hands")


@pytest.mark.parametrize("first", [True, False])
def test_a_request_for_machines_is_answered_whatever_the_backend_met(
    tmp_path: Path, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an answer the job waited for its machines until its patience was over."""
    made, desk, job = hands(tmp_path, Broken(4))
    made.do(Replenish(2, first=first), job)
    until(lambda: desk._batch.events)
    assert desk.take().events == [Allocated(2, (), "KeyError: 'node7'")]
    made.close(give_back=False)
    assert "in replenish" in caplog.text, "where it broke is told"


def test_other_calls_that_break_are_told_and_their_traceback_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _, job = hands(tmp_path, Broken(4))
    made.do(EvictNode("n0", "why", block=False), job)
    until(lambda: "backend: RuntimeError: no hands" in caplog.text)
    for number in (1, 2, 3):
        made.watch()
        until(lambda: made._watching is not None and made._watching.done())
        assert caplog.text.count("backend: UnicodeDecodeError") == number
    assert caplog.text.count("in watch\n") == 1
    made.close(give_back=False)
