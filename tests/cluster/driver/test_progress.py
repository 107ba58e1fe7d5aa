"""A blocking phase has a deadline of its own: a long save is no hang, a long step is one."""

from __future__ import annotations

from dataclasses import replace

from megascale.cluster.driver.progress import RankAge, deadline_s, find_stall
from megascale.config.cluster import ClusterConfig

CLUSTER = ClusterConfig(
    init_deadline_s=300.0,
    first_step_deadline_s=400.0,
    step_deadline_s=10.0,
    save_deadline_s=600.0,
)


def _age(phase: str | None, age_s: float, *, has_stepped: bool = True, rank: int = 0) -> RankAge:
    return RankAge(rank, phase, 7, age_s, age_s, has_stepped)


def test_a_long_save_is_no_hang() -> None:
    for phase in ("checkpoint", "validation"):
        assert find_stall([_age(phase, 599.0)], CLUSTER, 0.1) is None
        assert find_stall([_age(phase, 601.0)], CLUSTER, 0.1) is not None
    late = find_stall([_age("checkpoint", 500.0), _age("backward", 11.0, rank=3)], CLUSTER, 0.1)
    assert late is not None
    assert late.ranks == (3,)


def saving(*ages_s: float, saved: int | None = 3) -> list[RankAge]:
    return [replace(_age("checkpoint", a, rank=r), saved=saved) for r, a in enumerate(ages_s)]


def test_a_save_that_moves_nothing_is_a_hang_soon() -> None:
    stall = find_stall(saving(61.0, 300.0), CLUSTER, 0.1)
    assert stall is not None
    assert stall.ranks == (1, 0)
    assert "rank 1 has been in checkpoint for 300.0 s, 60.0 s are allowed" in stall.reason


def test_who_waits_for_a_save_that_moves_does_not_hang() -> None:
    assert find_stall(saving(300.0, 59.0, 300.0), CLUSTER, 0.1) is None
    assert find_stall(saving(601.0, 1.0), CLUSTER, 0.1) is not None, "600 s are for all of it"


def test_a_save_that_does_not_tell_may_be_long() -> None:
    assert find_stall(saving(300.0, 300.0, saved=None), CLUSTER, 0.1) is None
    mixed = [*saving(300.0), *saving(300.0, saved=None)]
    assert find_stall(mixed, CLUSTER, 0.1) is None


def test_deadlines_by_phase() -> None:
    assert deadline_s(_age(None, 0.0), CLUSTER, None) == 300.0
    assert deadline_s(_age("init", 0.0), CLUSTER, None) == 300.0
    assert deadline_s(_age("forward", 0.0, has_stepped=False), CLUSTER, None) == 400.0
    assert deadline_s(_age("forward", 0.0), CLUSTER, 0.1) == 10.0
    assert deadline_s(_age("forward", 0.0), CLUSTER, 30.0) == 150.0, "five median steps"


def test_a_stopped_process_has_no_longer_deadline_in_a_save() -> None:
    stopped = replace(_age("checkpoint", 10.5, rank=1), is_stopped=True)
    stall = find_stall([_age("checkpoint", 10.5), stopped], CLUSTER, 0.1)
    assert stall is not None
    assert stall.ranks == (1,)
    assert "in checkpoint, stopped, for 10.5 s" in stall.reason
    assert find_stall([replace(stopped, age_s=9.0)], CLUSTER, 0.1) is None
    assert find_stall([replace(stopped, phase="init", uptime_s=50.0)], CLUSTER, 0.1) is not None


def test_the_longest_is_named_first() -> None:
    stall = find_stall([_age("recv", 12.0), _age("send", 20.0, rank=5)], CLUSTER, 0.1)
    assert stall is not None
    assert stall.ranks == (5, 0)
    assert "rank 5 has been in send for 20.0 s, 10.0 s are allowed" in stall.reason
    assert find_stall([], CLUSTER, None) is None
