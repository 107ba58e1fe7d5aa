"""From heartbeats to events, deadlines and findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.driver.detectors import Detectors, localise_hang
from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.progress import RankAge, deadline_s, find_stall, least_deadline_s
from megascale.cluster.job import JobState
from megascale.cluster.messages import Heartbeat
from megascale.cluster.transitions import (
    Event,
    Found,
    HardwareSeen,
    NodeHeard,
    NodeSilent,
    RankExited,
    RanksStarted,
    StepReached,
)
from megascale.config.cluster import ClusterConfig
from megascale.telemetry.diagnose.hang import mesh_groups
from megascale.topology import Mesh
from tests.cluster.driver.jobs import ByHand, at_once, policy


def job(**changes: Any) -> JobState:
    hand = ByHand(policy(2, selfcheck="off", **changes))
    hand.train()
    return hand.job


def report(rank: int, step: int, *, phase: str = "forward", epoch: int = 1, **more: Any) -> Any:
    progress = {"epoch": epoch, "step": step, "phase": phase, "age_s": more.pop("age_s", 0.1)}
    return {
        "rank": rank,
        "local_rank": rank % 2,
        "pid": 1,
        "epoch": epoch,
        "state": "running",
        "progress": progress,
        **more,
    }


def beat(node: str, *ranks: Any, **more: Any) -> Heartbeat:
    base = {"node": node, "incarnation": f"i-{node}", "epoch": 1, "sequence": 1, "unix_ns": 1}
    return Heartbeat.model_validate({**base, "ranks": list(ranks), **more})


def events(digest: Digest, state: JobState, at_s: float, *beats: Heartbeat) -> list[Event]:
    found = [event for one in beats for event in digest.take(one, at_s, state)]
    return [*found, *digest.settle(state)]


def both(step: int, **more: Any) -> list[Heartbeat]:
    """A heartbeat of each node whose ranks work at `step`."""
    return [
        beat("n0", report(0, step, **more), report(1, step, **more)),
        beat("n1", report(2, step, **more), report(3, step, **more)),
    ]


def test_a_start_and_the_steps_that_all_ranks_finished() -> None:
    digest, state = Digest(), job()
    assert events(digest, state, 1.0, *both(0, phase="init")) == []
    assert events(digest, state, 2.0, *both(1)) == [RanksStarted(1)]
    assert events(digest, state, 3.0, both(4)[0]) == [], "half of the ranks"
    assert events(digest, state, 4.0, *both(3)) == [StepReached(1, 2)]
    assert events(digest, state, 5.0, *both(3)) == []


def test_sums_tell_of_the_last_step_before_the_page_does() -> None:
    digest, state = Digest(), job()
    sums = {"steps": [{"step": 7, "total_ns": 5, "phases": {}}]}
    assert events(digest, state, 1.0, *both(7, **sums))[-1] == StepReached(1, 7)


def test_a_save_is_told_with_the_step_after_it() -> None:
    digest, state = Digest(), job()
    events(digest, state, 1.0, *both(2))
    for second in (2, 3, 4):
        events(digest, state, second, *both(0, phase="checkpoint", age_s=second - 1.5))
    step = events(digest, state, 5.0, *both(3))[-1]
    assert isinstance(step, StepReached)
    assert step.saved_s == pytest.approx(2.5)


def test_an_exit_is_told_once_and_the_first_that_failed_first() -> None:
    digest, state = Digest(), job()
    dead: dict[str, Any] = {"state": "exited", "exit_code": -9}
    failure = {"kind": "network", "message": "peer", "unix_ns": 1}
    told = beat(
        "n1",
        report(2, 3, **dead | {"exit_code": 1, "failure": failure}),
        report(3, 3, **dead),
        first_failed=3,
    )
    assert events(digest, state, 1.0, told) == [
        RankExited(3, -9, 1, "signal", "", "SIGKILL", 3),
        RankExited(2, 1, 1, "network", "peer", None, 3),
    ]
    assert events(digest, state, 2.0, told) == []


def test_ranks_of_another_epoch_are_passed_over() -> None:
    digest, state = Digest(), job()
    old = report(0, 9, epoch=0, state="exited", exit_code=-9)
    assert events(digest, state, 1.0, beat("n0", old)) == []
    assert not digest.ranks


def test_a_suspect_that_is_heard_is_told() -> None:
    hand = ByHand(policy(2, selfcheck="off"))
    hand.train()
    hand.go(NodeSilent("n1", 4.0))
    assert events(Digest(), hand.job, 1.0, beat("n1")) == [NodeHeard("n1")]


def test_what_is_sick_for_certain_is_told_once_and_what_is_not_each_time() -> None:
    digest, state = Digest(), job()
    sick = {"devices": [{"index": 3, "xid": [13, 79], "ecc_uncorrected": 0}]}
    (seen,) = events(digest, state, 1.0, beat("n0", **sick))
    assert isinstance(seen, HardwareSeen)
    assert (seen.kind, seen.certain) == ("xid", True)
    assert "off the bus" in seen.detail
    assert events(digest, state, 2.0, beat("n0", **sick)) == []
    harmless = {"devices": [{"index": 0, "xid": [13, 31, 43], "ecc_uncorrected": 1}]}
    assert events(digest, state, 1.0, beat("n1", **harmless)) == [], "the program's own"
    grown = {"devices": [{"index": 0, "ecc_uncorrected": 2}]}
    (ecc,) = events(digest, state, 1.0, beat("n1", **grown))
    assert isinstance(ecc, HardwareSeen)
    assert ecc.kind == "ecc_uncorrected"


def _nic(*, up: bool, flaps: int, down_s: float = 0.0) -> Heartbeat:
    of = {"up": up, "flaps": flaps, "down_s": down_s}
    nics = [{"name": "mlx5_0/1", **of}, {"name": "veth9", **of}]
    return beat("n0", report(0, 3), report(1, 3), nics=nics)


def test_a_link_that_is_down_for_five_seconds_is_told_as_flapping() -> None:
    digest, state = Digest(), job()
    assert events(digest, state, 1.0, _nic(up=True, flaps=2)) == [], "before the job"
    (down,) = events(digest, state, 2.0, _nic(up=False, flaps=3))
    assert isinstance(down, HardwareSeen)
    assert (down.node, down.kind, down.certain) == ("n0", "nic_mlx5_0/1", False)
    assert "1 times" in down.detail, "those before the job do not count"
    assert events(digest, state, 6.0, _nic(up=False, flaps=3)) == []
    (flap,) = events(digest, state, 7.0, _nic(up=True, flaps=3, down_s=5.0))
    assert isinstance(flap, Found)
    assert (flap.finding.kind, flap.finding.ranks, flap.finding.certain) == (
        "link_flap",
        (0, 1),
        False,
    )
    assert flap.finding.evidence["flapped"] == {"n0/mlx5_0/1": "down for 5.0 s, up again"}


@pytest.mark.parametrize(("again_s", "certain"), [(290.0, True), (310.0, False)])
def test_a_link_that_goes_down_twice_in_five_minutes_is_certain(
    again_s: float, certain: bool
) -> None:
    digest, state = Digest(), job()
    events(digest, state, 1.0, _nic(up=True, flaps=0))
    events(digest, state, 2.0, _nic(up=False, flaps=1))
    events(digest, state, 3.0, _nic(up=True, flaps=1))
    (again,) = events(digest, state, 2.0 + again_s, _nic(up=False, flaps=2))
    assert isinstance(again, HardwareSeen)
    assert again.certain is certain


def test_two_flaps_between_two_heartbeats_are_two() -> None:
    digest, state = Digest(), job()
    events(digest, state, 1.0, _nic(up=True, flaps=0))
    twice, _ = events(digest, state, 2.0, _nic(up=True, flaps=2))
    assert isinstance(twice, HardwareSeen)
    assert twice.certain


def test_the_kernel_tells_of_a_machine_but_not_a_ranks_log() -> None:
    digest, state = Digest(), job()
    line = {"rule": "machine_check", "line": "mce: [Hardware Error]", "unix_ns": 1}
    assert events(digest, state, 1.0, beat("n0", log=[{**line, "rank": 0}])) == []
    (seen,) = events(digest, state, 1.0, beat("n0", log=[line]))
    assert isinstance(seen, HardwareSeen)
    assert seen.kind == "machine_check"


# ---------------------------------------------------------------- deadlines


def age(phase: str | None, age_s: float, *, stepped: bool = True, rank: int = 0) -> RankAge:
    return RankAge(rank, phase, 4, age_s, age_s, stepped)


@pytest.mark.parametrize(
    ("rank", "median_s", "limit_s"),
    [
        (age(None, 0), None, 300.0),
        (age("init", 0, stepped=False), None, 300.0),
        (age("forward", 0, stepped=False), None, 600.0),
        (age("forward", 0), None, 10.0),
        (age("recv", 0), 1.0, 10.0),
        (age("recv", 0), 30.0, 150.0),
        (age("checkpoint", 0), 1.0, 600.0),
        (age("validation", 0), 1.0, 600.0),
        (age("done", 0), 1.0, 600.0),
    ],
)
def test_the_deadline_of_a_phase(rank: RankAge, median_s: float | None, limit_s: float) -> None:
    assert deadline_s(rank, ClusterConfig(), median_s) == limit_s


def test_a_stall_names_the_longest_first_and_a_long_save_is_none() -> None:
    ranks = [
        age("checkpoint", 500.0, rank=0),
        age("recv", 11.0, rank=1),
        age("forward", 14.0, rank=2),
        age("forward", 9.0, rank=3),
    ]
    stall = find_stall(ranks, ClusterConfig(), 1.0)
    assert stall is not None
    assert stall.ranks == (2, 1)
    assert "rank 2 has been in forward for 14.0 s, 10.0 s are allowed" in stall.reason
    assert find_stall(ranks[:1], ClusterConfig(), 1.0) is None


def test_the_ranks_of_a_silent_node_do_not_age() -> None:
    digest, state = Digest(), job()
    events(digest, state, 1.0, *both(3))
    assert {rank.age_s for rank in digest.ages(0.0)} == {0.1}


def test_who_said_something_just_now_is_not_looked_at_but_while_saving() -> None:
    digest, state = Digest(), job()
    events(digest, state, 1.0, *both(3))
    assert not digest.ages(least_deadline_s(ClusterConfig()))
    events(digest, state, 2.0, *both(3, phase="checkpoint"))
    assert len(digest.ages(least_deadline_s(ClusterConfig()))) == 4


# ---------------------------------------------------------------- detectors


def program(tmp_path: Path) -> Program:
    groups = mesh_groups(Mesh(tensor=1, data=4, pipeline=1))
    return Program(tmp_path, (), groups=lambda _world: groups)


def found(detectors: Detectors, digest: Digest, state: JobState) -> list[tuple[str, Any, bool]]:
    return [
        (event.finding.kind, event.finding.ranks, event.finding.certain)
        for event in detectors.look(digest, state)
        if isinstance(event, Found)
    ]


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    digest, state = Digest(), job()
    beats = both(5, age_s=20.0)
    events(digest, state, 1.0, *beats)
    events(digest, state, 1.0, beat("n1", report(2, 5, age_s=20.0, os_state="T")))
    finding = localise_hang(digest, program(tmp_path).groups(4), {}, (0, 1, 2, 3), 2.0)
    assert (finding.kind, finding.ranks, finding.certain) == ("hang", (2,), True)


@pytest.mark.parametrize(
    ("phase", "named"),
    [("done", (3,)), ("forward", (0, 1, 2))],
)
def test_ranks_that_ended_well_hold_up_nobody(
    tmp_path: Path, phase: str, named: tuple[int, ...]
) -> None:
    """The last one hangs in its last save. Those that end in the middle are another thing."""
    digest, state = Digest(), job()
    over: Any = {"phase": phase, "state": "exited", "exit_code": 0}
    last = report(3, 9, phase="checkpoint", age_s=700.0)
    events(digest, state, 1.0, beat("n0", report(0, 9, **over), report(1, 9, **over)))
    events(digest, state, 1.0, beat("n1", report(2, 9, **over), last))
    finding = localise_hang(digest, program(tmp_path).groups(4), {}, (3,), 2.0)
    assert finding.ranks == named


@pytest.mark.parametrize(("step_s", "after"), [(1.0, 16), (0.25, 61)])
def test_a_slow_rank_is_a_straggler_after_some_windows(
    step_s: float, after: int, tmp_path: Path
) -> None:
    """Of short steps only after 15 s: until then it is told and no more."""
    state = job(straggler_window=5, straggler_windows=3, straggler_share=0.05)
    digest, detectors = Digest(), Detectors(program(tmp_path), at_once())
    seen: list[tuple[str, Any, bool]] = []
    for step in range(1, 80):
        beats = []
        for node, ranks in (("n0", (0, 1)), ("n1", (2, 3))):
            of = [
                report(
                    rank,
                    step + 1,
                    steps=[
                        {
                            "step": step,
                            "total_ns": 2000,
                            "phases": {"forward": 1300 if rank == 3 else 1000 + step % 3},
                        }
                    ],
                )
                for rank in ranks
            ]
            beats.append(beat(node, *of))
        events(digest, state, step * step_s, *beats)
        seen += found(detectors, digest, state)
        if any(certain for _, _, certain in seen):
            break
    assert set(seen[:-1]) <= {("slow_rank", (3,), False)}
    assert seen[-1] == ("straggler", (3,), True)
    assert step == after, "three windows of five, behind the first step, and 15 s"


def test_digests_of_replicas_name_the_minority(tmp_path: Path) -> None:
    state, digest, detectors = job(), Digest(), Detectors(program(tmp_path), at_once())
    found(detectors, digest, state)
    for rank in range(4):
        noticed = {
            "name": "replicas_differ",
            "step": 6,
            "detail": {"digests": {"layers.0": "bad" if rank == 2 else "good"}},
        }
        events(digest, state, 1.0, beat(f"n{rank // 2}", report(rank, 7, noticed=[noticed])))
    assert found(detectors, digest, state) == [("replicas_differ", (2,), True)]
    assert found(detectors, digest, state) == []


def test_what_is_not_finite_is_told_but_left_to_the_trainer(tmp_path: Path) -> None:
    state, digest, detectors = job(), Digest(), Detectors(program(tmp_path), at_once())
    found(detectors, digest, state)
    noticed = [{"name": "nonfinite", "step": 6, "detail": {"parameter": "w"}}]
    events(digest, state, 1.0, *both(7, noticed=noticed))
    assert found(detectors, digest, state) == [("nonfinite_step", (), False)]


@pytest.mark.parametrize(("least", "told"), [(0.0, []), (1.0, [("loss_spike", (), True)])])
def test_a_spike_of_the_loss(tmp_path: Path, least: float, told: list[Any]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 99.0}\n')
    state = job(loss_spike=least)
    digest, detectors = Digest(), Detectors(program(tmp_path), at_once())
    assert found(detectors, digest, state) == []
    losses = [4.0 + 0.01 * (step % 5) for step in range(40)] + [9.0] * 3
    with metrics.open("a") as file:
        for step, loss in enumerate(losses):
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        file.write('{"step": 43, "lo')
    seen = [one for one in found(detectors, digest, state) if one[2]]
    assert seen == told
