"""Which tiers keep the state after a step: a pure decision, the same on all ranks (MegaScale 4.4).

Steps are counted by every rank. Minutes are the writer's alone, because clocks differ: before each
step it votes which tiers' time is up, the step's sum over the world carries the vote (`step.py`),
and whoever has read a step's sums decides by them. So all ranks save after the same step without a
message of its own, at most two steps after the time was up.

A vote that was cast before the tier's last save says nothing: a step is under way while the one
before is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config import CheckpointConfig

DISK, REMOTE = 1, 2  # bits of a vote


@dataclass(frozen=True)
class Due:
    """What keeps the state as it is after a step. `remote`: the checkpoint on disk goes there."""

    memory: bool = False
    disk: bool = False
    remote: bool = False


class Schedule:
    """Of one run on one rank. Moments are handed in, in seconds of the writer's steady clock."""

    def __init__(self, settings: CheckpointConfig, now_s: float) -> None:
        self._settings = settings
        self._minutes = {
            DISK: settings.interval_minutes,
            REMOTE: settings.remote_interval_minutes,
        }
        self._last_s = dict.fromkeys(self._minutes, now_s)
        self._last_step = dict.fromkeys(self._minutes, 0)
        self._is_asked = dict.fromkeys(self._minutes, False)

    def vote(self, now_s: float) -> int:
        """The writer's, for the step that starts now: the tiers whose time is up. The others vote
        0, so that the sum over all ranks is the writer's vote."""
        return sum(
            tier
            for tier, minutes in self._minutes.items()
            if minutes and now_s - self._last_s[tier] >= 60.0 * minutes
        )

    def voted(self, step: int, vote: int) -> None:
        """The sums of `step` carried this vote."""
        for tier in self._minutes:
            if vote & tier and step > self._last_step[tier]:
                self._is_asked[tier] = True

    def due(self, step: int) -> Due:
        """After `step`."""
        settings = self._settings
        if not settings.enable:
            return Due()
        disk = self._is_asked[DISK] or _is_multiple(step, settings.interval)
        return Due(
            memory=_is_multiple(step, settings.memory_interval),
            disk=disk,
            remote=disk and self._is_remote_due(step),
        )

    def last(self) -> Due:
        """At the end of a run, or where it is told to stop."""
        return Due(disk=True, remote=bool(self._settings.remote))

    def saved(self, step: int, due: Due, now_s: float) -> None:
        """What is `due` after `step` is taken care of."""
        for tier, is_due in ((DISK, due.disk), (REMOTE, due.remote)):
            if is_due:
                self._last_s[tier], self._last_step[tier] = now_s, step
                self._is_asked[tier] = False

    def went_to(self, step: int) -> None:
        """The run stands after `step`: it resumed, or went back. Older votes say nothing."""
        for tier in self._minutes:
            self._last_step[tier], self._is_asked[tier] = step, False

    def _is_remote_due(self, step: int) -> bool:
        """Once there is a checkpoint on disk."""
        settings = self._settings
        if not settings.remote:
            return False
        steps, minutes = settings.remote_interval, settings.remote_interval_minutes
        if not (steps or minutes):
            return True
        return self._is_asked[REMOTE] or _is_multiple(step, steps)


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
