"""The memory slots of a node's ranks: they outlive ranks, epochs, not their agent nor the next."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megascale.cluster.messages import Leave, StopRanks
from tests.cluster.agent.conftest import Ordered, StartAgent, gone_within, pids_in
from tests.cluster.agent.fake_driver import FakeDriver

KEEPS = """
import os, sys, time
from pathlib import Path
slot = Path(os.environ["MEGASCALE_MEMORY_SLOTS"] + ".own0")
with slot.open("a") as file:
    file.write(os.environ["MEGASCALE_EPOCH"] + " ")
with open(sys.argv[0].rpartition("/")[0] + "/told", "a") as file:
    file.write(f"{os.getpid()}\\n")
with open(sys.argv[0].rpartition("/")[0] + "/slots", "a") as file:
    file.write(f"{slot}\\n")
time.sleep(600)
"""


def _slots(tmp_path: Path) -> list[Path]:
    return sorted({Path(line) for line in (tmp_path / "slots").read_text().splitlines()})


def test_slots_outlive_ranks_and_not_the_agent(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(KEEPS, num_ranks=2), epoch=1)).ok
    first = pids_in(tmp_path / "told", 2)
    os.kill(first[0], signal.SIGKILL)
    assert driver.result_of(driver.order(StopRanks(), epoch=1)).ok
    assert driver.result_of(driver.order(ordered(KEEPS, num_ranks=2), epoch=2)).ok
    pids_in(tmp_path / "told", 4)
    slots = _slots(tmp_path)
    assert [slot.name for slot in slots] == ["slots-000.own0", "slots-001.own0"]
    assert [slot.read_text() for slot in slots] == ["1 2 ", "1 2 "]
    assert slots[0].is_relative_to("/dev/shm")
    assert driver.result_of(driver.order(StopRanks(), epoch=2)).ok
    assert driver.result_of(driver.order(Leave(), epoch=2)).ok
    assert agent.wait(10) == 0
    assert not slots[0].parent.exists()


def test_a_killed_agent_leaves_none_to_the_next(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(KEEPS))).ok
    pids_in(tmp_path / "told", 1)
    agent.kill()
    agent.wait()
    gone_within(tmp_path, 5.0)
    (slot,) = _slots(tmp_path)
    start_agent()
    driver.wait(lambda: len(driver.joins) == 2, 30.0, "the second join")
    assert not slot.exists()
