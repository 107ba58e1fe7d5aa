"""Lives of a trainer, one after another on the same memory and disk, each killed in a save.

A warm process forks each life (hundredths of a second), kills it with SIGKILL at a seeded instant,
and holds what the next life finds against what the killed one had done:

1. The newest state in memory is of the last complete save, or of the one that was in flight.
2. No save was left out: the numbers of saves grow as steps do.
3. All checkpoints that were due are there, up to the one in flight; rotation leaves the last three.
4. Both load bitwise: each is held against what that number of steps makes.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from megascale.checkpoint.manifest import list_checkpoints
from tests.checkpoint.kills.births import Lives
from tests.checkpoint.kills.board import Board, Field, Orders, Where
from tests.checkpoint.kills.life import DISK_INTERVAL, KEEP, Found, slots_of


@dataclass(frozen=True)
class Past:
    """What the killed life had found at its start, and done: its boards, by rank."""

    found: Found
    boards: list[dict[Field, int]]
    memory_is_lost: bool = False

    def memory(self) -> set[int | None]:
        """Steps of which the newest state in memory may be: the last that is known to be complete,
        or the one in flight."""
        if self.memory_is_lost:
            return {None}
        start, complete = self.found.start, self.newest(Field.COMPLETE)
        if complete > start:
            return {complete, complete + 1}
        return {self.found.kept, start + 1}

    def number(self, step: int) -> int:
        """Of the save to memory of `step`."""
        num_steps = step - self.found.start
        return self.found.last_number + num_steps if num_steps else self.found.number

    def checkpoints(self) -> list[list[int]]:
        """Steps of all in the order of their commits: without and with the one in flight."""
        before, start = self.found.committed[::-1], self.found.start
        # A rank that outlived the others for a moment saw its save fail, and started another.
        started = min(board[Field.STARTED] for board in self.boards)
        due = [step for step in range(start + 1, started + 1) if step % DISK_INTERVAL == 0]
        committed = self.newest(Field.COMMITTED)
        assert len([step for step in due if step > committed]) <= 1, self
        return [before + [step for step in due if step <= committed], before + due]

    def newest(self, what: Field) -> int:
        """What one rank knows to be on all ranks is."""
        return max(board[what] for board in self.boards)


@dataclass
class Campaign:
    """folder    on tmpfs
    outcomes  what the kills met, counted
    """

    folder: Path
    world_size: int
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lives = Lives(self.folder, [Board() for _ in range(self.world_size)])
        self._past: Past | None = None
        self._calibrate()

    def _calibrate(self) -> None:
        """A life that is not killed: how long saves take here."""
        with self._born(Orders(4 * DISK_INTERVAL, "disk", 0, None, is_behind=False)) as found:
            took = self._lives.ended()
        self._windows_s = {"memory": 1.5 * took.memory_s, "disk": 1.2 * took.disk_s}
        self._past = self._done(found)

    def kill_at_an_instant(self) -> None:
        where: Where = self._random.choice(("memory", "disk"))
        quiet_steps, is_behind = self._random.randrange(4), self._random.random() < 0.5
        delay_s = self._random.random() * self._windows_s[where]
        ranks = list(range(self.world_size))
        self._random.shuffle(ranks)
        rest_s = self._random.choice((0.0, 0.02)) * self._random.random()
        with self._born(Orders(None, where, quiet_steps, None, is_behind)) as found:
            self._lives.await_save()
            time.sleep(delay_s)
            self._past = self._done(found)  # read before: peers of the killed may fail then
            self._lives.kill(ranks[0])
            time.sleep(rest_s if len(ranks) > 1 else 0)
            for rank in ranks[1:]:
                self._lives.kill(rank)
        # What was done between the look at the board and the kill counts too.
        self._past = replace(self._past, boards=self._done(found).boards)
        in_flight = [
            self._past.newest(Field.RUN) > self._past.newest(Field.COMPLETE),
            self._past.newest(Field.STARTED) > self._past.newest(Field.COMMITTED),
        ]
        self.outcomes["kills"] += 1
        self.outcomes["memory"] += in_flight[0]
        self.outcomes["disk"] += in_flight[1]

    def kill_at_point(self, point: int, *, is_behind: bool) -> bool:
        """False where its life ended before it came to that point."""
        with self._born(Orders(DISK_INTERVAL, "disk", 0, point, is_behind)) as found:
            was_killed = self._lives.await_death()
        self._past = self._done(found)
        self._sweep()
        self.outcomes["points"] += was_killed
        return was_killed

    def _sweep(self) -> None:
        """Take away what was not committed: else each of those adds points to the next save."""
        listing = list_checkpoints(self.folder / "checkpoints")
        for path in (*listing.interrupted, *listing.damaged):
            shutil.rmtree(path)

    def lose_memory(self) -> None:
        """Other nodes go on: the disk alone is left."""
        for rank in range(self.world_size):
            shutil.rmtree(slots_of(self.folder, rank).parent)
        assert self._past is not None
        self._past = replace(self._past, memory_is_lost=True)

    def end(self) -> None:
        """A last life, which looks at what the last kill left."""
        with self._born(Orders(1, "memory", 0, None, is_behind=False)):
            self._lives.ended()

    def _born(self, orders: Orders) -> Lives:
        found = self._lives.begin(orders)
        if self._past is not None:
            self._check(found, self._past)
        return self._lives

    def _done(self, found: Found) -> Past:
        return Past(found, [{what: board[what] for what in Field} for board in self._lives.boards])

    def _check(self, found: Found, past: Past) -> None:
        assert found.wrong == [], (found, past)
        assert past.newest(Field.FAILED) == 0 or self.world_size > 1, (found, past)
        assert found.memory in past.memory(), (found, past)
        if found.memory is not None:
            assert found.number == past.number(found.memory), (found, past)
        allowed = past.checkpoints()
        assert any(_is_rotated(found.committed[::-1], all_) for all_ in allowed), (found, past)
        assert found.disk == (found.committed[0] if found.committed else None), (found, past)
        in_flight = set(allowed[1]) - set(allowed[0])
        assert set(found.damaged) - set(past.found.damaged) <= in_flight, (found, past)
        self.outcomes["saves that counted"] += found.memory == max(past.memory(), key=_or_0)
        self.outcomes["checkpoints that counted"] += len(found.committed) > 0


def _is_rotated(there: list[int], all_: list[int]) -> bool:
    """Are these what rotation leaves of `all_`: the last ones, and nothing else, in order?"""
    rest = iter(all_)
    return there[-KEEP:] == all_[-KEEP:] and all(step in rest for step in there)


def _or_0(step: int | None) -> int:
    return step or 0
