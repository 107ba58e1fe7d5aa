"""Programs that set flags and wait for flags, run in some order: does every one of them end?

A flag once set stays until its one reader has it, so a step that can run can still run later,
whatever others do in between: either every order of the programs ends or none does. One order is
proof; the tests run several.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

Flag = tuple[int, int]  # rank whose memory it is in, index


class Step(NamedTuple):
    """One tile or copy: waits for all of `waits`, then sets all of `sets`."""

    waits: list[Flag]
    sets: list[Flag]


Program = list[Step]


def stuck(
    grids: Sequence[Sequence[Program]], *, resident: int | None = None, seed: int | None = None
) -> list[tuple[int, int]]:
    """(grid, step) of programs that never end; none is what one hopes for.

    Of each grid only `resident` programs are on the device at one time (None: all); the next begins
    when one ends. `seed` shuffles the order in which programs get on.
    """
    shuffle = random.Random(seed)
    queues = [list(grid) for grid in grids]
    running: list[tuple[int, Program, int]] = []
    flags: set[Flag] = set()
    while True:
        for number, queue in enumerate(queues):
            on = sum(grid == number for grid, _, _ in running)
            while queue and (resident is None or on < resident):
                running.append((number, queue.pop(0), 0))
                on += 1
        if seed is not None:
            shuffle.shuffle(running)
        moved = False
        for place, (number, program, at) in enumerate(running):
            while at < len(program) and flags.issuperset(program[at].waits):
                flags.update(program[at].sets)
                at, moved = at + 1, True
                if seed is not None:
                    break
            running[place] = (number, program, at)
        ended = [entry for entry in running if entry[2] == len(entry[1])]
        running = [entry for entry in running if entry[2] < len(entry[1])]
        if not moved and not ended:
            return [(number, at) for number, _, at in running]
