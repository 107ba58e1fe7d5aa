"""When is a rank that says nothing new too long in its phase? Pure.

| phase | deadline |
|---|---|
| no page yet (counted from the rank's start), or `init` | `cluster.init_deadline_s` |
| first step of the epoch | `cluster.first_step_deadline_s`: compilation is in it |
| `checkpoint`, `validation` | `cluster.save_deadline_s` |
| a save that tells | also `cluster.save_progress_deadline_s` in which no rank moved anything |
| a step | `cluster.step_deadline_s`, or 5 times the median step where that is more |
| `done` | none: the process is ending, and `cluster.save_deadline_s` bounds that |
| any, where the process is stopped by a signal | that of a step: no phase is an excuse for it |

The age is that of the rank's last word, as the agent measured it for its last heartbeat. A blocking
phase has its own deadline, so a long save is no hang; liveness of the node says nothing
here, so a fresh heartbeat hides no hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megascale.config.cluster import ClusterConfig

SAVING = frozenset({"checkpoint", "validation"})
MEDIANS = 5.0


@dataclass(frozen=True)
class RankAge:
    """phase: None before the rank's first word; age_s: since its last one, or since its start;
    saved: what its save has moved, None for one that does not tell; is_stopped: by a signal or a
    tracer, as the system says."""

    rank: int
    phase: str | None
    step: int | None
    age_s: float
    uptime_s: float
    has_stepped: bool
    saved: int | None = None
    is_stopped: bool = False


@dataclass(frozen=True)
class Stall:
    """Ranks past their deadline, the longest first."""

    ranks: tuple[int, ...]
    reason: str
    step: int | None


def least_deadline_s(cluster: ClusterConfig) -> float:
    """Who said something within it is inside every deadline."""
    return min(
        cluster.step_deadline_s,
        cluster.init_deadline_s,
        cluster.first_step_deadline_s,
        cluster.save_deadline_s,
    )


def deadline_s(rank: RankAge, cluster: ClusterConfig, median_step_s: float | None) -> float:
    """Seconds that `rank` may be without a word in its phase."""
    step_s = max(cluster.step_deadline_s, MEDIANS * (median_step_s or 0.0))
    if rank.is_stopped:
        return step_s
    if rank.phase in (None, "init"):
        return cluster.init_deadline_s
    if rank.phase in SAVING or rank.phase == "done":
        return cluster.save_deadline_s
    if not rank.has_stepped:
        return cluster.first_step_deadline_s
    return step_s


def find_stall(
    ranks: Iterable[RankAge], cluster: ClusterConfig, median_step_s: float | None
) -> Stall | None:
    """The ranks past their deadlines; None while all are inside."""
    ranks = list(ranks)
    late = []
    stuck = _is_save_stuck(ranks, cluster)
    for rank in ranks:
        waited_s = rank.uptime_s if rank.phase is None else rank.age_s
        limit_s = deadline_s(rank, cluster, median_step_s)
        if stuck and rank.phase == "checkpoint":
            limit_s = min(limit_s, cluster.save_progress_deadline_s)
        if waited_s > limit_s:
            late.append((waited_s, limit_s, rank))
    if not late:
        return None
    late.sort(key=lambda one: (-one[0], one[2].rank))
    waited_s, limit_s, first = late[0]
    phase = first.phase or "its start"
    if first.is_stopped:
        phase = f"{phase}, stopped,"
    return Stall(
        tuple(rank.rank for _, _, rank in late),
        f"rank {first.rank} has been in {phase} for {waited_s:.1f} s, {limit_s:.1f} s are allowed",
        first.step,
    )


def _is_save_stuck(ranks: Sequence[RankAge], cluster: ClusterConfig) -> bool:
    """All ranks that save tell what they move, and none has moved anything for too long."""
    saving = [rank for rank in ranks if rank.phase == "checkpoint"]
    if not saving or any(rank.saved is None for rank in saving):
        return False
    return min(rank.age_s for rank in saving) > cluster.save_progress_deadline_s
