"""Every detector is asked on live data, and leads to the decision of the ladder."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster import driver
from megascale.cluster.actions import Alert, SelfCheck, StartEpoch, StopEpoch
from megascale.cluster.driver.detectors import Detectors
from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.program import Program
from megascale.cluster.transitions import Event, Found, HangSuspected, NodeGone
from megascale.events import Span, to_line
from megascale.telemetry.diagnose import DETECTORS
from megascale.telemetry.diagnose.hang import mesh_groups
from megascale.topology import Mesh
from tests.cluster.driver.jobs import ByHand, at_once
from tests.cluster.driver.test_digest import beat, events, report
from tests.cluster.driver.test_ladder import evicted, training

NODES = 3
Counter = Callable[[int, int], int]  # bytes of a node at a second


def test_the_driver_asks_every_detector() -> None:
    names = [module.name for module in pkgutil.iter_modules(driver.__path__)]
    asked = {
        id(value)
        for name in names
        for value in vars(importlib.import_module(f"{driver.__name__}.{name}")).values()
        if callable(value)
    }
    assert [name for name, one in DETECTORS.items() if id(one) not in asked] == []


class Live:
    """Three nodes of two ranks and one port each; a second is a heartbeat of all, and a look."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        groups = mesh_groups(Mesh(2, NODES, 1))
        self.hand: ByHand = training(NODES, spares=1, **changes)
        self.detectors = Detectors(Program(folder, (), groups=lambda _world: groups), at_once())
        self.digest, self.second, self.step = Digest(), 0, 5
        self.seen: list[Event] = []

    def beat(self, **of_node: Any) -> list[Event]:
        """`phase`, `silent`, and by node `count`, `errors`, `settings`."""
        self.second += 1
        phase = of_node.get("phase", "forward")
        self.step = of_node.get("step", self.step + (phase == "forward"))
        for node in range(NODES):
            if node == of_node.get("silent"):
                continue
            nic: dict[str, Any] = {
                "name": "mlx5_0/1",
                "up": True,
                "counters": {
                    "port_xmit_data": of_node["count"](node, self.second),
                    "symbol_error": of_node.get("errors", lambda _: 0)(node),
                },
                "settings": of_node.get("settings", lambda _: {})(node),
            }
            ranks = [report(2 * node + i, self.step, phase=phase) for i in (0, 1)]
            events(
                self.digest, self.hand.job, float(self.second), beat(f"n{node}", *ranks, nics=[nic])
            )
        found = list(self.detectors.look(self.digest, self.hand.job))
        self.seen += found
        return found

    def kinds(self) -> list[tuple[str, tuple[int, ...], bool]]:
        return [
            (e.finding.kind, e.finding.ranks, e.finding.certain)
            for e in self.seen
            if isinstance(e, Found)
        ]

    def decide(self) -> None:
        for event in self.seen:
            self.hand.go(event)


def _steady(_node: int, second: int) -> int:
    return 1000 * second


def _until(node: int, second: int) -> Counter:
    return lambda n, now: _steady(n, min(now, second) if n == node else now)


def test_a_node_whose_traffic_stops_is_recovered_from_at_once(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for _ in range(20):
        assert live.beat(count=_until(1, 20)) == []
    seconds = 0
    while not live.seen and seconds < 10:
        live.beat(count=_until(1, 20))
        seconds += 1
    assert live.kinds() == [("traffic_stopped", (2, 3), True)]
    assert seconds <= 5
    live.decide()
    assert live.hand.the(StopEpoch).save is False
    live.hand.stopped()
    assert live.hand.the(SelfCheck).nodes == ("n1",)


def test_saves_between_steps_hide_no_stop(tmp_path: Path) -> None:
    """Every third heartbeat finds a rank in a save; so often they are only in small jobs."""
    live = Live(tmp_path)
    for second in range(40):
        live.beat(count=_until(1, 20), phase="forward" if second % 3 else "checkpoint")
    assert live.kinds() == [("traffic_stopped", (2, 3), True)]


def test_a_silent_node_has_not_stopped_its_traffic(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for second in range(40):
        live.beat(count=_steady, silent=1 if 20 < second < 32 else None)
    assert live.seen == []


def test_traffic_that_stops_everywhere_is_looked_into_as_a_hang(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for _ in range(40):
        live.beat(count=lambda _node, now: _steady(0, min(now, 20)))
    (first, *_) = live.seen
    assert isinstance(first, HangSuspected)
    assert first.ranks == (0, 1, 2, 3, 4, 5)
    assert "no port has moved a byte" in first.reason


def test_traffic_that_rests_while_ranks_save_is_no_fault(tmp_path: Path) -> None:
    live = Live(tmp_path)
    moved = 0

    def count(_node: int, _second: int) -> int:
        return moved

    for second in range(80):
        saving = 20 < second < 60
        moved += 0 if saving else 1000
        live.beat(count=count, phase="checkpoint" if saving else "forward")
    assert live.seen == []


def _falls(node: int, after: int, to: float) -> Counter:
    """1000 bytes a second, then less."""
    return lambda n, now: int(
        1000 * min(now, after) + 1000 * (to if n == node else 1.0) * max(0, now - after)
    )


def test_traffic_that_falls_is_an_alert_and_isolated_after_its_windows(tmp_path: Path) -> None:
    live = Live(tmp_path, straggler_window=50, straggler_windows=3)
    fallen = _falls(2, 600, 0.5)
    for _ in range(600):
        live.beat(count=fallen)
    assert live.seen == []
    for _ in range(130):
        live.beat(count=fallen)
    assert live.kinds() == [("traffic_fell", (4, 5), False)], "told once"
    for _ in range(400):
        live.beat(count=fallen)
    assert live.kinds()[1:] == [("traffic_fell", (4, 5), True)]
    alert, certain = live.seen
    assert isinstance(certain, Found)
    assert 150 <= certain.finding.evidence["steps"] <= 170
    for _ in range(2):  # alerts alone never isolate it
        live.hand.go(alert)
        assert live.hand.job.phase == "training"
    live.hand.go(certain)
    assert live.hand.the(StopEpoch).save is True, "at a saved state"
    live.hand.stopped()
    assert evicted(live.hand) == {"n2": True}


def test_a_fall_that_passes_isolates_nobody(tmp_path: Path) -> None:
    live = Live(tmp_path, straggler_window=50, straggler_windows=3)
    total = [0] * NODES
    for second in range(1200):
        for node in range(NODES):
            total[node] += 500 if node == 2 and 500 <= second < 600 else 1000
        live.beat(count=lambda node, _second: total[node])
    assert live.kinds()[0] == ("traffic_fell", (4, 5), False)
    assert not any(certain for *_, certain in live.kinds())


@pytest.mark.parametrize("step_s", [0.13, 1.0, 7.0])
def test_steps_and_counters_of_other_moments_are_no_fault(tmp_path: Path, step_s: float) -> None:
    """A heartbeat comes any time in its second, and bytes move at the end of a step."""
    live, rng = Live(tmp_path), random.Random(4)

    def count(_node: int, second: int) -> int:
        return 1_000_000 * int((second - rng.uniform(0.0, 1.0)) / step_s)

    for second in range(1500):
        live.beat(count=count, step=5 + int(second / step_s))
    assert live.seen == []


def _settings(node: int) -> dict[str, str]:
    return {"rate": "100 Gb/sec" if node == 1 else "200 Gb/sec", "roce_np/ecn": "1"}


@pytest.mark.parametrize(("policy", "evicts"), [("warn", False), ("evict", True)])
def test_a_node_that_is_set_otherwise(tmp_path: Path, policy: str, evicts: bool) -> None:
    live = Live(tmp_path, nic_settings=policy)
    for _ in range(3):
        live.beat(count=_steady, settings=_settings)
    assert live.kinds() == [("nic_settings", (2, 3), True)]
    live.decide()
    assert live.hand.job.open[-1].nodes == ("n1",)
    if evicts:
        live.hand.stopped()
        assert evicted(live.hand) == {"n1": True}
        return
    assert "of n1" in live.hand.the(Alert).text
    assert live.hand.job.phase == "training"
    live.decide()
    assert live.hand.job.phase == "training", "twice is not certain either"


def test_settings_that_came_before_the_first_look_are_not_lost(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for node in range(NODES):
        for settings in (_settings(node), {}):
            nic = {"name": "mlx5_0/1", "up": True, "settings": settings}
            events(live.digest, live.hand.job, 0.5, beat(f"n{node}", nics=[nic]))
    live.beat(count=_steady)
    assert live.kinds() == [("nic_settings", (2, 3), True)]


def test_nothing_is_kept_of_nodes_that_left(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.beat(count=_steady, settings=_settings)
    events(live.digest, live.hand.job, 1.0, beat("s0", nics=[{"name": "mlx5_0/1", "up": True}]))
    live.hand.go(NodeGone("n1"))
    live.hand.stopped()
    events(live.digest, live.hand.job, 2.0, beat("n0", report(0, 6, epoch=2)))
    live.beat(count=_steady, silent=1)
    ports = live.detectors._ports
    assert {*ports._settings} == {*ports._first} == {"n0", "n2"}
    assert {*ports._counted} == {"n0", "n2", "s0"}
    assert {node for node, _ in live.digest._hardware._memory} == {"n0", "n2", "s0"}


def test_errors_and_light_of_a_port_are_alerts(tmp_path: Path) -> None:
    live = Live(tmp_path)

    def light(node: int) -> dict[str, str]:
        return {f"device/hwmon/hwmon{node}/power1_input": "300" if node == 2 else "1000"}

    live.beat(count=_steady, settings=light)
    assert live.kinds() == [("nic_light", (4, 5), False)]
    for second in range(310):
        live.beat(count=_steady, errors=lambda node: second * (node == 0))  # noqa: B023
    assert live.kinds()[1:] == [("nic_errors", (0, 1), False)]
    live.decide()
    assert live.hand.job.phase == "training"


def test_who_launches_late_is_told_once(tmp_path: Path) -> None:
    live = Live(tmp_path, straggler_window=10)
    (tmp_path / "telemetry").mkdir()
    for rank in range(2 * NODES):
        lines, t_ns = [], 10**9
        for seq in range(40):
            late_ns = 8_000_000 if rank == 3 else 0
            span = Span(
                rank=rank,
                name="tp",
                t0_ns=t_ns,
                dur_ns=1000,
                clock="device",
                issued_ns=t_ns + late_ns,
                step=10,
                group="tensor",
                seq=seq,
            )
            lines.append(to_line(span))
            t_ns += 18_000_000  # all go on once the last has come
        (tmp_path / "telemetry" / f"rank_{rank:05d}.jsonl").write_text("\n" + "".join(lines))
    for _ in range(40):
        live.beat(count=_steady)
    assert live.kinds() == [("late_launch", (3,), False)]
    live.decide()
    assert live.hand.job.phase == "training"


def test_clocks_of_nodes_decide_nothing(tmp_path: Path) -> None:
    """A wall clock that is an hour ahead, or goes back."""

    def told(clock_ns: Callable[[int], int]) -> list[Event]:
        digest, state = Digest(), training().job
        detectors = Detectors(
            Program(tmp_path, (), groups=lambda _: mesh_groups(Mesh(2, 2, 1))), at_once()
        )
        seen: list[Event] = []
        for second in range(1, 30):
            for node in range(2):
                ranks = [report(2 * node + i, second) for i in (0, 1)]
                one = beat(f"n{node}", *ranks, unix_ns=clock_ns(second) if node else second)
                seen += events(digest, state, float(second), one)
            seen += detectors.look(digest, state)
        return seen

    usual = told(lambda second: second)
    assert usual
    assert told(lambda second: (second + 3600) * 10**9) == usual
    assert told(lambda second: 10**18 - second * 10**9) == usual


def test_the_node_of_rank_0_is_replaced_as_any_other() -> None:
    hand = training(spares=1)
    hand.go(NodeGone("n0", "its machine is gone"))
    hand.stopped()
    assert hand.places() == {0: "s0", 1: "n1"}
    assert hand.the(StartEpoch).resume
