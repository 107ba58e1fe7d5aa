"""A hang is suspected, dumps are asked for, and what they say is not lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.cluster.actions import SelfCheck, StartEpoch
from megascale.cluster.decide import decide
from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.watch import Watch
from megascale.cluster.messages import Command, DumpStacks, Result
from megascale.cluster.transitions import CheckDone, Found, HangSuspected, RankExited
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.hang import mesh_groups
from megascale.topology import Mesh
from tests.cluster.driver.jobs import at_once
from tests.cluster.driver.test_digest import beat, both, events, job, report
from tests.cluster.driver.test_ladder import evicted, training

IN_A_WAIT = """Thread 7 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    summer.<locals>.sum_over_group (megascale/parallel/groups.py:96)
"""
ASLEEP = """Thread 7 (idle): "MainThread"
    forward (fault.py:21)
    TransformerChunk.forward (megascale/model/transformer.py:108)
"""


def _result(node: str, sequence: int, stacks: dict[str, Any]) -> tuple[Result, Command]:
    command = Command(epoch=1, sequence=sequence, order=DumpStacks(ranks=[]))
    base = {"node": node, "incarnation": f"i-{node}", "epoch": 1, "sequence": sequence, "ok": True}
    return Result.model_validate({**base, "detail": {"stacks": stacks}}), command


def test_dumps_that_come_before_the_next_look_are_read(tmp_path: Path) -> None:
    """An idle machine dumps in less than the second between two looks."""
    groups = mesh_groups(Mesh(2, 2, 1))
    watch = Watch(Program(tmp_path, (), groups=lambda _: groups), at_once())
    digest, state = Digest(), job(step_deadline_s=10.0)
    events(digest, state, 1.0, *both(4))
    events(digest, state, 20.0, *both(5, phase="optimizer", age_s=11.0))
    (suspected,) = watch.look(digest, state, 20.0)
    assert isinstance(suspected, HangSuspected)
    state = decide(state, suspected, 20.0).job
    watch.see_result(*_result("n0", 8, {"0": IN_A_WAIT, "1": IN_A_WAIT}))
    watch.see_result(*_result("n1", 9, {"2": ASLEEP, "3": IN_A_WAIT}))
    (found,) = watch.look(digest, state, 21.0)
    assert isinstance(found, Found)
    assert (found.finding.ranks, found.finding.certain) == ((2,), True)


def test_whose_bits_differ_is_heard_while_the_ranks_stop(tmp_path: Path) -> None:
    """All of them raise right behind the comparison; the first exit must not decide."""
    groups = mesh_groups(Mesh(1, 4, 1))
    watch = Watch(Program(tmp_path, (), groups=lambda _: groups), at_once())
    hand = training(spares=1)
    digest = Digest()
    for node in range(2):
        ranks = [2 * node, 2 * node + 1]
        told = [
            {
                "name": "replicas_differ",
                "step": 6,
                "detail": {"digests": {"b": "bad" if rank == 2 else "good"}, "agreed_step": 4},
            }
            for rank in ranks
        ]
        reports = [
            report(rank, 6, noticed=[one], state="exited", exit_code=6)
            for rank, one in zip(ranks, told, strict=True)
        ]
        for event in digest.take(beat(f"n{node}", *reports), 1.0, hand.job):
            assert isinstance(event, RankExited)
            message = "step 6: parameters differ between data-parallel replicas in b"
            hand.go(replace(event, kind="exception", message=message))
        assert hand.phase() == "stopping"
        for event in watch.hear(digest, hand.job):
            hand.go(event)
    hand.stopped()
    assert evicted(hand) == {"n1": True}, "where rank 2 was, and no other"
    assert hand.the(StartEpoch).newest_step == 4


def test_of_two_replicas_the_replay_tells_which_is_bad() -> None:
    hand = training(2, spares=1)
    message = "step 6: parameters differ between data-parallel replicas in b"
    hand.go(RankExited(2, 6, 1, kind="exception", message=message))
    hand.go(Found(Finding("replicas_differ", (0, 2), {"majority": False}, 6, certain=False)))
    assert hand.phase() == "stopping"
    hand.stopped()
    assert hand.job.faults[-1].ranks == (0, 2), "who says so first is not to blame for it"
    assert "no majority" in hand.decision.reason
    assert set(hand.the(SelfCheck).nodes) == {"n0", "n1"}
    hand.go(CheckDone("n0", ok=True))
    hand.go(CheckDone("n1", ok=False, failures=("replay",)))
    assert evicted(hand) == {"n1": True}
    assert hand.places() == {0: "n0", 1: "s0"}


def test_a_rank_that_is_stopped_in_a_save_is_suspected_after_a_steps_deadline(
    tmp_path: Path,
) -> None:
    watch = Watch(Program(tmp_path, (), groups=lambda _: mesh_groups(Mesh(2, 2, 1))), at_once())
    digest, state = Digest(), job(step_deadline_s=10.0)
    events(digest, state, 1.0, *both(4))
    events(digest, state, 12.0, *both(5, phase="checkpoint", age_s=11.0))
    assert list(watch.look(digest, state, 12.0)) == [], "a save may take that long"
    stopped = report(2, 5, phase="checkpoint", age_s=11.0, os_state="T")
    events(digest, state, 12.5, beat("n1", stopped))
    (suspected,) = watch.look(digest, state, 13.0)
    assert isinstance(suspected, HangSuspected)
    assert suspected.ranks == (2,)
