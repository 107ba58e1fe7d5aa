"""What only Slurm has, on a real one: queues, drained nodes, node failures."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest

from megascale.cluster.backends import make_backend, slurm_commands
from megascale.cluster.backends.base import Backend, BackendError
from megascale.errors import LaunchError
from tests.cluster.backends.harness import LocalHarness, wait_for, wait_until
from tests.cluster.backends.slurm_cluster import SlurmHarness

pytestmark = pytest.mark.full


def slurm(place: SlurmHarness, **options: Any) -> Backend:
    return make_backend("slurm", place.start, options={**place.options, **options})


def occupy(place: SlurmHarness, count: int) -> None:
    """Somebody else's jobs on `count` nodes."""
    for _ in range(count):
        place.cluster.ask("sbatch", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    wait_until(
        lambda: place.cluster.ask("squeue", "-ho", "%T").split() == ["RUNNING"] * count, "them"
    )


def queue(place: SlurmHarness) -> list[str]:
    return place.cluster.ask("squeue", "-ho", "%j").split()


def state_of(place: SlurmHarness, host: str) -> str:
    return place.cluster.ask("sinfo", "-hN", f"--nodes={host}", "-o", "%T|%E").strip()


def test_a_blocked_node_is_drained_with_the_reason(slurm_place: SlurmHarness) -> None:
    backend = slurm(slurm_place)
    bad, fine = backend.allocate(2)
    backend.evict(bad.name, "bad memory", block=True)
    backend.evict(fine.name, "a slow step", block=False)
    assert state_of(slurm_place, bad.host) == "drained|megascale: bad memory"
    assert state_of(slurm_place, fine.host) == "idle|none"


def test_a_node_that_may_not_be_drained_is_excluded_and_that_is_said(
    slurm_place: SlurmHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = slurm(slurm_place)
    machines = backend.allocate(slurm_place.hosts)
    words = "slurm_update error: Invalid user id"
    monkeypatch.setattr(slurm_commands, "drain", lambda host, reason: words)
    with caplog.at_level(logging.WARNING):
        backend.evict(machines[0].name, "bad memory", block=True)
    assert f"{machines[0].host} is kept out of this job only, not drained: {words}" in caplog.text
    assert state_of(slurm_place, machines[0].host) == "idle|none"
    assert backend.replenish(1) == []


def test_without_drain_no_node_is_changed(slurm_place: SlurmHarness) -> None:
    backend = slurm(slurm_place, drain=False)
    machines = backend.allocate(slurm_place.hosts)
    backend.evict(machines[0].name, "bad memory", block=True)
    assert state_of(slurm_place, machines[0].host) == "idle|none"
    assert backend.replenish(1) == []


def test_a_node_that_dies_is_down_then_gone_and_the_others_stay(slurm_place: SlurmHarness) -> None:
    backend = slurm(slurm_place)
    lost, kept = backend.allocate(2)
    said = slurm_place.said(lost.name)
    slurm_place.said(kept.name)
    slurm_place.cluster.kill_slurmd(lost.host)
    (down,) = wait_for(backend.watch, "Slurm to miss it")
    assert (down.name, down.kind) == (lost.name, "down")
    (gone,) = wait_for(backend.watch, "Slurm to give it up")
    assert (gone.name, gone.kind) == (lost.name, "gone")
    assert "NODE_FAIL" in gone.reason
    for pid in (said["child"], said["pid"]):
        os.kill(pid, signal.SIGKILL)  # a dead machine has no processes
    wait_until(lambda: slurm_place.running() == {kept.name}, "them to go")
    (more,) = backend.replenish(1)
    assert more.host not in (lost.host, kept.host)


def test_a_node_that_answers_again_is_up(slurm_place: SlurmHarness) -> None:
    backend = slurm(slurm_place)
    (machine,) = backend.allocate(1)
    slurm_place.cluster.kill_slurmd(machine.host)
    (down,) = wait_for(backend.watch, "Slurm to miss it")
    slurm_place.cluster.start_slurmd(machine.host)
    (back,) = wait_for(backend.watch, "Slurm to hear it")
    assert (down.kind, back.kind) == ("down", "up")


def test_a_suspended_machine_is_preempted_and_given_back(slurm_place: SlurmHarness) -> None:
    backend = slurm(slurm_place)
    (machine,) = backend.allocate(1)
    slurm_place.said(machine.name)
    slurm_place.cluster.ask("scontrol", "suspend", machine.handle)
    (event,) = wait_for(backend.watch, "the event")
    assert (event.name, event.kind) == (machine.name, "preempted")
    wait_until(lambda: not queue(slurm_place), "its job to go")
    assert slurm_place.running() == set()


def test_an_allocation_that_does_not_start_in_time_gives_all_back(
    slurm_place: SlurmHarness,
) -> None:
    occupy(slurm_place, 1)
    backend = slurm(slurm_place, allocate_s=3.0)
    with pytest.raises(BackendError, match=r"6 machines were asked for, Slurm started 5 within 3"):
        backend.allocate(slurm_place.hosts)
    wait_until(lambda: queue(slurm_place) == ["wrap"], "the started ones to go")


def test_replenish_takes_what_starts_in_time_and_leaves_nothing_in_the_queue(
    slurm_place: SlurmHarness,
) -> None:
    occupy(slurm_place, 3)
    backend = slurm(slurm_place, replenish_s=3.0)
    backend.allocate(1)
    more = backend.replenish(4)
    assert len(more) == 2
    assert len(queue(slurm_place)) == 3 + 1 + 2


def test_what_sbatch_refuses_is_said_and_nothing_is_left(slurm_place: SlurmHarness) -> None:
    backend = slurm(slurm_place, arguments="--licenses='none such'")
    with pytest.raises(BackendError, match=r"sbatch .*Invalid license specification"):
        backend.allocate(2)
    assert queue(slurm_place) == []


def test_the_token_is_on_no_command_line_and_in_no_job(slurm_place: SlurmHarness) -> None:
    backend = slurm(slurm_place)
    (machine,) = backend.allocate(1)
    token = slurm_place.said(machine.name)["token"]
    shown = slurm_place.cluster.ask("scontrol", "show", "job", "-dd", machine.handle)
    script = slurm_place.cluster.ask("scontrol", "write", "batch_script", machine.handle, "-")
    assert "--token-file" in script
    assert token not in shown + script


def test_without_slurm_the_error_says_what_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    backend = make_backend("slurm", LocalHarness(tmp_path).start)
    with pytest.raises(BackendError, match="squeue is not installed here; start the job where"):
        backend.allocate(1)


def test_a_misspelt_option_is_refused(tmp_path: Any) -> None:
    with pytest.raises(LaunchError, match="unknown key 'partitions'; did you mean 'partition'"):
        make_backend("slurm", LocalHarness(tmp_path).start, options={"partitions": "a"})


@pytest.mark.parametrize(
    ("state", "usable", "answers"),
    [
        ("idle", True, True),
        ("allocated", True, True),
        ("mixed", True, True),
        ("idle*", False, False),
        ("down*", False, False),
        ("drained", False, True),
        ("draining", False, True),
        ("allocated*", False, False),
        ("failing", False, True),
        ("maint", False, True),
        ("unknown*", False, False),
    ],
)
def test_states_of_sinfo(state: str, usable: bool, answers: bool) -> None:
    node = slurm_commands.Node("n1", state, "none")
    assert (node.usable, node.answers) == (usable, answers)
