"""The driver as a whole, against agents without processes that speak HTTP on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.backends.base import MachineEvent
from megascale.cluster.driver.journal import Journal
from megascale.cluster.driver.program import Program
from megascale.cluster.transitions import Event, Policy, StopRequested, UpdateRequested
from tests.cluster.driver.fakes import Cluster, FakeAgent, cluster
from tests.cluster.driver.jobs import ByHand, policy


def quick(nodes: int = 2, **changes: Any) -> Policy:
    """Deadlines of tenths of seconds."""
    times: dict[str, Any] = {
        "heartbeat_interval_s": 0.1,
        "suspect_after_s": 2.0,
        "flap_tolerance_s": 5.0,
        "grace_s": 0.2,
        "kill_deadline_s": 1.0,
    }
    return policy(nodes, 2, **{**times, **changes})


def held(made: Cluster) -> dict[tuple[int, int] | None, str]:
    """Ranks -> node; None: the spare. Which of the nodes joined first nobody knows."""
    return {node.ranks: node.node for node in made.status().nodes if node.state != "lost"}


def test_a_job_from_its_start_to_its_end(tmp_path: Path) -> None:
    with cluster(tmp_path, quick()) as made:
        made.configure = lambda agent: setattr(agent, "last_step", 8)
        made.run()
        assert made.end() == 0
        kinds = [order["kind"] for order in made.agents["n0"].obeyed]
        assert kinds[:2] == ["selfcheck", "start"]
        assert set(kinds[2:]) <= {"leave"}, "or a heartbeat told it first"
        made.agents.until_left("n0", "n1")
        order = made.agents["n1"].obeyed[1]
        assert [rank["rank"] for rank in order["ranks"]] == [2, 3], "in order of names"
        assert (order["world_size"], order["master_addr"]) == (4, "127.0.0.1")
        assert made.backend.closed


def test_a_killed_rank_restarts_the_job_within_two_seconds(tmp_path: Path) -> None:
    with cluster(tmp_path, quick()) as made:
        made.run()
        made.until_trains()
        rank = made.agents["n1"].ranks[0]
        rank.failure = {"kind": "signal", "message": "", "signal": "SIGKILL"}
        rank.state, rank.exit_code = "exited", -9
        status = made.until(lambda s: s.epoch == 2, timeout_s=10.0)
        assert status.incidents[0].cause == "signal"
        assert status.incidents[0].ranks == [2]
        made.until(lambda s: s.phase == "training" and not s.incidents)
        assert not made.backend.evicted
        assert made.status().restarts == {"signal": 1}


def test_a_silent_node_is_suspect_then_lost_and_a_spare_takes_its_ranks(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(spares=1)) as made:
        made.run()
        made.until(lambda s: s.phase == "training" and any(n.state == "spare" for n in s.nodes))
        before = held(made)
        lost, spare = before[0, 1], before[None]
        made.agents[lost].silent = True
        made.until(lambda s: any(n.node == lost and n.state == "suspect" for n in s.nodes))
        made.until_trains(epoch=2)
        after = held(made)
        assert after[0, 1] == spare, "the spare takes the lost node's ranks"
        assert after[2, 3] == before[2, 3]
        made.agents[lost].silent = False  # it comes back
        made.until(lambda _: made.agents[lost].left)


def test_a_flap_changes_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(flap_tolerance_s=20.0)) as made:
        made.run()
        made.until_trains()
        made.agents["n1"].silent = True
        made.until(lambda s: s.nodes[1].state == "suspect")
        made.agents["n1"].silent = False
        made.until(lambda s: s.nodes[1].state == "active")
        assert made.status().epoch == 1
        assert not made.status().incidents


def test_a_machine_that_its_backend_lost_is_replaced_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(flap_tolerance_s=60.0, suspect_after_s=30.0)) as made:
        made.run()
        made.until_trains()
        made.agents["n1"].silent = True
        made.backend.events.append(MachineEvent("n1", "preempted", "by a larger job"))
        made.until_trains(epoch=2)
        assert {n.node: n.ranks for n in made.status().nodes if n.ranks} == {
            "n0": (0, 1),
            "n2": (2, 3),
        }


def test_a_rank_that_hangs_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(step_deadline_s=1.0)) as made:
        made.run()
        made.until_trains(step=4)
        for agent in made.agents.by_name.values():
            for rank in agent.ranks:
                rank.stuck = True
        status = made.until(lambda s: any(i.cause == "hang" for i in s.incidents))
        assert status.incidents[0].cause == "hang"
        made.until_trains(epoch=2)
        dumps = [o for a in made.agents.by_name.values() for o in a.obeyed if o["kind"] == "dump"]
        assert sorted(rank for order in dumps for rank in order["ranks"]) == [0, 1, 2, 3]


def test_a_sick_device_evicts_its_node(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(spares=1)) as made:
        made.run()
        made.until(lambda s: s.phase == "training" and any(n.state == "spare" for n in s.nodes))
        sick = held(made)[2, 3]
        made.agents[sick].extra = {"devices": [{"index": 0, "xid": [79]}]}
        made.until_trains(epoch=2)
        assert (sick, True) in made.backend.evicted
        assert made.status().blocked == [f"host-{sick}"]
        made.until(lambda _: made.agents[sick].left)


def test_a_node_that_fails_its_check_never_trains(tmp_path: Path) -> None:
    def sick(agent: FakeAgent) -> None:
        agent.check_ok = agent.name != "n0"

    with cluster(tmp_path, quick()) as made:
        made.configure = sick
        made.run()
        made.until_trains()
        assert {n.node for n in made.status().nodes if n.ranks} == {"n1", "n2"}
        assert all(order["kind"] != "start" for order in made.agents["n0"].obeyed)


def test_people_evict_update_and_stop(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(spares=1)) as made:
        made.run()
        made.until(lambda s: s.phase == "training" and any(n.state == "spare" for n in s.nodes))
        holders = held(made)
        request = {"node": holders[2, 3], "reason": "maintenance", "block": False}
        assert made.client.post("/v1/evict", json=request).status_code == 200
        made.until_trains(epoch=2)
        stops = [o for o in made.agents[holders[0, 1]].obeyed if o["kind"] == "stop"]
        assert [order["save"] for order in stops] == [True]
        refused = made.client.post("/v1/update", json={"overrides": ["a.b=1"]})
        assert refused.status_code == 422, "nothing to update in a job without a recipe"
        assert made.client.post("/v1/stop").status_code == 200
        assert made.end() == 0


def test_a_job_that_goes_on_says_which_updates_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hand = ByHand(quick())
    journal = Journal(tmp_path / "driver" / "journal.sqlite")
    journal.begin(hand.decision, 0.0)
    update = UpdateRequested(("optimizer.lr=9", "x.y=1"))
    events: tuple[Event, ...] = (update, StopRequested())
    for event in events:
        journal.append([(event, hand.go(event), hand.now_s)])
    journal.close()
    with cluster(tmp_path, quick()) as made:
        made.started.driver._program = Program(tmp_path, ("train", "--set", "x.y=1"))
        made.run()
        made.until_trains()
    (told,) = [one.message for one in caplog.records if "count no more" in one.message]
    assert "before count no more: optimizer.lr=9; give them again" in told


def test_when_all_nodes_are_silent_the_driver_blames_itself(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(3)) as made:
        made.run()
        made.until_trains()
        for agent in made.agents.by_name.values():
            agent.silent = True
        made.until(lambda s: all(node.silence_s > 8.0 for node in s.nodes))
        assert {node.state for node in made.status().nodes} == {"suspect"}
        for agent in made.agents.by_name.values():
            agent.silent = False
        made.until(lambda s: all(node.state == "active" for node in s.nodes))
        assert made.status().epoch == 1
