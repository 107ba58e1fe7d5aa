"""When each tier keeps the state, by steps and by minutes, and that all ranks agree on it."""

from __future__ import annotations

import random

import pytest

from megascale.config import CheckpointConfig
from megascale.train.tiers import DISK, REMOTE, Due, Schedule


def _steps(schedule: Schedule, last: int, what: str) -> list[int]:
    """After which steps `what` is due, where nothing takes time."""
    found = []
    for step in range(1, last + 1):
        due = schedule.due(step)
        if getattr(due, what):
            found.append(step)
        schedule.saved(step, due, 0.0)
    return found


def test_steps_alone() -> None:
    settings = CheckpointConfig(interval=4, memory_interval=1, remote="r", remote_interval=8)
    assert _steps(Schedule(settings, 0.0), 16, "memory") == list(range(1, 17))
    assert _steps(Schedule(settings, 0.0), 16, "disk") == [4, 8, 12, 16]
    assert _steps(Schedule(settings, 0.0), 16, "remote") == [8, 16]


def test_without_an_interval_of_its_own_each_checkpoint_goes_to_the_remote() -> None:
    settings = CheckpointConfig(interval=3, remote="r")
    assert _steps(Schedule(settings, 0.0), 9, "remote") == [3, 6, 9]


@pytest.mark.parametrize("off", ["enable", "remote"])
def test_what_is_off_is_never_due(off: str) -> None:
    changed = {"enable": False} if off == "enable" else {"remote": ""}
    settings = CheckpointConfig(**{"interval": 1, "memory_interval": 1, "remote": "r", **changed})
    schedule = Schedule(settings, 0.0)
    assert schedule.due(1) == (Due() if off == "enable" else Due(memory=True, disk=True))
    assert schedule.last() == Due(disk=True, remote=off == "enable")


def _run(
    settings: CheckpointConfig, step_s: float, num_steps: int, *, ahead: bool, num_ranks: int = 3
) -> list[list[tuple[int, Due]]]:
    """The saves of each rank, as the loop has them: rank 0's clock alone is right, the others'
    are anywhere; `ahead`: a step's sums are read while the next one is under way."""
    rng = random.Random(3)
    offsets_s = [0.0, *(rng.uniform(-1e6, 1e6) for _ in range(num_ranks - 1))]
    ranks = [Schedule(settings, offset_s) for offset_s in offsets_s]
    saves: list[list[tuple[int, Due]]] = [[] for _ in ranks]
    votes: dict[int, int] = {}
    for step in range(1, num_steps + 1):
        now_s = (step - 1) * step_s
        votes[step] = sum(
            schedule.vote(now_s + offset_s) if rank == 0 else 0
            for rank, (schedule, offset_s) in enumerate(zip(ranks, offsets_s, strict=True))
        )
        read = step - 1 if ahead else step
        for rank, schedule in enumerate(ranks):
            if read:
                schedule.voted(read, votes[read])
            due = schedule.due(step)
            if due.disk:
                saves[rank].append((step, due))
            schedule.saved(step, due, now_s + step_s + offsets_s[rank])
    return saves


@pytest.mark.parametrize("ahead", [False, True])
def test_all_ranks_take_the_writers_minutes(ahead: bool) -> None:
    """A minute of 10 s a step: the vote of the step that starts at 60 s, and so on."""
    saves = _run(CheckpointConfig(interval_minutes=1.0), 10.0, 40, ahead=ahead)
    assert saves[0] == saves[1] == saves[2]
    steps = [step for step, _ in saves[0]]
    assert steps == ([8, 16, 24, 32, 40] if ahead else [7, 14, 21, 28, 35])


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_or_minutes_whichever_is_first(ahead: bool) -> None:
    fast = _run(CheckpointConfig(interval=5, interval_minutes=1.0), 1.0, 20, ahead=ahead)
    assert [step for step, _ in fast[0]] == [5, 10, 15, 20]
    slow = _run(CheckpointConfig(interval=5, interval_minutes=1.0), 30.0, 10, ahead=ahead)
    assert slow[0] == slow[1] == slow[2]
    # the interval's own steps stay, and between them never more than 60 s and two steps pass
    steps = [step for step, _ in slow[0]]
    assert {5, 10} <= set(steps)
    assert max(b - a for a, b in zip([0, *steps], steps, strict=False)) <= 4


def test_minutes_to_the_remote_wait_for_the_next_checkpoint() -> None:
    settings = CheckpointConfig(interval=4, remote="r", remote_interval_minutes=1.0)
    saves = _run(settings, 10.0, 24, ahead=True)
    assert [(step, due.remote) for step, due in saves[2]] == [
        *((4, False), (8, True), (12, False)),
        *((16, True), (20, False), (24, True)),
    ]


def test_a_vote_from_before_the_last_save_says_nothing() -> None:
    schedule = Schedule(CheckpointConfig(interval_minutes=1.0), 0.0)
    schedule.voted(3, schedule.vote(61.0))
    assert schedule.due(4).disk
    schedule.saved(4, schedule.due(4), 70.0)
    schedule.voted(4, DISK)  # step 4 had started before it was saved
    assert not schedule.due(5).disk
    schedule.voted(5, DISK)
    assert schedule.due(6).disk


def test_a_run_that_went_back_counts_votes_of_the_steps_that_it_does_again() -> None:
    settings = CheckpointConfig(interval_minutes=1.0, remote="r", remote_interval_minutes=2.0)
    schedule = Schedule(settings, 0.0)
    schedule.saved(9, Due(disk=True, remote=True), 10.0)
    schedule.voted(10, DISK)
    schedule.went_to(4)
    assert not schedule.due(5).disk
    schedule.voted(5, DISK | REMOTE)
    assert schedule.due(6) == Due(disk=True, remote=True)


def test_the_vote_names_each_tier_by_its_own_minutes() -> None:
    settings = CheckpointConfig(interval_minutes=1.0, remote="r", remote_interval_minutes=2.0)
    schedule = Schedule(settings, 100.0)
    votes = [schedule.vote(now_s) for now_s in (159.9, 160.0, 219.9, 220.0)]
    assert votes == [0, DISK, DISK, DISK | REMOTE]
    schedule.saved(1, Due(disk=True), 220.0)
    assert schedule.vote(221.0) == REMOTE
