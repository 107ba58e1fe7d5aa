"""Where the wall clock went: the ledger of effective training time (MegaScale 6.2, ETTR).

    useful      steps that were new            replay      steps that an earlier epoch had done
    checkpoint  saves that steps waited for    detection   from the last step to the fault's name
    diagnosis   dumps and self-checks          restart     stop, start, load, until the first step
    idle        no machines

Invariant: the kinds sum to the booked wall time exactly, because time is whole nanoseconds and each
of them is booked once. While ranks train, time since the last step stays unbooked: only the next
step, or the fault, says what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

TimeKind = Literal["useful", "checkpoint", "detection", "diagnosis", "restart", "replay", "idle"]
KINDS: tuple[TimeKind, ...] = get_args(TimeKind)


@dataclass(frozen=True)
class Ledger:
    """Nanoseconds by kind, booked from `start_ns` to `marked_ns` of the job's clock."""

    start_ns: int = 0
    marked_ns: int = 0
    useful_ns: int = 0
    checkpoint_ns: int = 0
    detection_ns: int = 0
    diagnosis_ns: int = 0
    restart_ns: int = 0
    replay_ns: int = 0
    idle_ns: int = 0

    @property
    def wall_ns(self) -> int:
        return self.marked_ns - self.start_ns

    @property
    def ettr(self) -> float | None:
        """Useful share of the booked time; None where nothing was booked."""
        return self.useful_ns / self.wall_ns if self.wall_ns else None

    def book(self, now_s: float, kind: TimeKind) -> Ledger:
        """All time since the last booking was `kind`. A clock that went back books nothing."""
        elapsed_ns = _ns(now_s) - self.marked_ns
        if elapsed_ns <= 0:
            return self
        return self._add(kind, elapsed_ns)

    def book_steps(self, now_s: float, *, new: int, replayed: int, saved_s: float = 0.0) -> Ledger:
        """Time since the last booking went into so many steps, and `saved_s` of it into a save."""
        elapsed_ns = max(0, _ns(now_s) - self.marked_ns)
        saved_ns = min(elapsed_ns, _ns(saved_s))
        stepping_ns = elapsed_ns - saved_ns
        replayed_ns = stepping_ns * replayed // max(1, new + replayed)
        booked = self._add("checkpoint", saved_ns)._add("replay", replayed_ns)
        return booked._add("useful", stepping_ns - replayed_ns)

    def seconds(self) -> dict[str, float]:
        """By kind, for people."""
        return {kind: getattr(self, f"{kind}_ns") / 1e9 for kind in KINDS}

    def _add(self, kind: TimeKind, num_ns: int) -> Ledger:
        name = f"{kind}_ns"
        assert name in {field.name for field in fields(self)}, name
        changes = {"marked_ns": self.marked_ns + num_ns, name: getattr(self, name) + num_ns}
        return replace(self, **changes)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
