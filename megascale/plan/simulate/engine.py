"""Runs the operations of all stages in the order of time: an event simulation.

Three kinds of things take time, and each goes on alone once it has begun: a compute (one at a time
a stage), a transfer (one at a time a channel), a data-parallel collective (one at a time a stage).
So the heap holds ends only: of a stage's compute or wait, by the stage's number, and of transfers,
by theirs plus the number of stages.

A stage has one link out and one in, and a transfer has those of its two ends for itself, so that
activations to the next stage and gradients to the one before leave one after the other. Whoever was
ready first goes first. Collectives are priced alone and do not take turns.

Compute beside communication. A compute that takes `w` alone advances at speed 1 where nothing is
communicated, `1 - transfer_loss` while its stage sends or receives, `1 - data_loss` beside a
data-parallel collective, and less both losses beside both. What begins later is not known when a
compute begins, so its end is only expected, and when that moment comes it is looked at again. The
time that each stream has been busy is kept as a sum (`_Stream`), so that costs no list of overlaps.

Written for speed: at 12,288 GPUs a step has some 10^5 computes. Lists and tuples in the loop, no
object for an event.
"""

from __future__ import annotations

from heapq import heappop, heappush

from megascale.plan.simulate.program import (
    AWAIT,
    COMPUTE,
    NEED,
    PAUSE,
    POST,
    START,
    Program,
)

_NEGLIGIBLE_S = 1e-11

TimedSpan = tuple[int, float, float]
"""Label or item, begin, end."""

Wait = tuple[int, int, float, float]
"""NEED or AWAIT, what was waited for, from, to; never of no length."""


class _Stream:
    """How long a stage's communication of one kind has been going on. Told in order of time."""

    __slots__ = ("total_s", "until_s")

    def __init__(self) -> None:
        self.total_s = 0.0  # of all intervals told so far, also of what is still to come of them
        self.until_s = 0.0

    def add(self, begin_s: float, end_s: float) -> None:
        """`begin_s` is not before that of an earlier interval; they may overlap."""
        if end_s > self.until_s:
            self.total_s += end_s - max(begin_s, self.until_s)
            self.until_s = end_s

    def busy_s(self, now_s: float) -> float:
        """Up to now."""
        ahead_s = self.until_s - now_s
        return self.total_s - ahead_s if ahead_s > 0.0 else self.total_s


class Engine:
    """One run of a program; its results are the public attributes.

    spans[s]       computes and pauses of stage s, in order
    waits[s]       when it waited, and for what
    data_spans[s]  its data-parallel collectives, in order
    end_s[s]       when stage s was through its list
    met_s[t], begin_s[t]  when the last party of transfer t was ready, and when it began
    """

    def __init__(self, program: Program) -> None:
        count, table = len(program.stages), program.transfers
        self.spans: list[list[TimedSpan]] = [[] for _ in range(count)]
        self.waits: list[list[Wait]] = [[] for _ in range(count)]
        self.data_spans: list[list[TimedSpan]] = [[] for _ in range(count)]
        self.end_s = [0.0] * count
        self.met_s = [0.0] * len(table.seconds)
        self.begin_s = [0.0] * len(table.seconds)
        self._count = count
        self._ops = [stage.ops for stage in program.stages]
        self._position = [0] * count
        self._since_s = [0.0] * count  # when the compute or wait at that position began
        self._goal_s = [0.0] * count  # what `_advanced_s` says when the compute is over
        self._waits_for = [-1] * count  # a transfer
        self._seconds, self._following = table.seconds, table.following
        self._stages = table.stages
        self._missing = [len(stages) for stages in table.stages]  # parties that have not posted
        self._is_over = [False] * len(table.seconds)
        self._is_blocked = _blocked(table.following)  # by the one before it on its channel
        self._sends, self._receives = [False] * count, [False] * count
        self._to_send: list[list[int]] = [[] for _ in range(count)]  # ready, and no link is free
        self._to_receive: list[list[int]] = [[] for _ in range(count)]
        self._transfer_loss = program.transfer_loss
        self._data_loss = [stage.data_loss for stage in program.stages]
        assert all(program.transfer_loss + loss < 1.0 for loss in self._data_loss), (
            "computes would stand still beside communication",
            program.transfer_loss,
            self._data_loss,
        )
        self._slows = [program.transfer_loss + loss > 0.0 for loss in self._data_loss]
        self._pipe = [_Stream() for _ in range(count)]
        self._data = [_Stream() for _ in range(count)]
        self._heap: list[tuple[float, int]] = []

    def run(self) -> None:
        """To the end of every stage's list. Raises AssertionError where they are in a deadlock."""
        heap, count = self._heap, self._count
        for stage in range(count):
            self._advance(stage, 0.0)
        while heap:
            now_s, code = heappop(heap)
            if code >= count:
                self._end_transfer(code - count, now_s)
            elif self._is_done(code, now_s):
                self._advance(code, now_s)
        stuck = [s for s in range(count) if self._position[s] < len(self._ops[s])]
        assert not stuck, f"deadlock: stages {stuck} wait for what never comes"

    # ------------------------------------------------------------ a stage

    def _advance(self, stage: int, now_s: float) -> None:
        """From its position on, until something takes time."""
        ops, position = self._ops[stage], self._position[stage]
        while position < len(ops):
            code, item, seconds = ops[position]
            if code == POST:
                self._post(item, now_s)
            elif code == NEED:
                if not self._is_over[item]:
                    self._waits_for[stage] = item
                    break
            elif code == COMPUTE:
                self._begin_compute(stage, seconds, now_s)
                break
            elif code == START:
                self._start_collective(stage, item, seconds, now_s)
            elif code == AWAIT:
                over_s = self.data_spans[stage][item][2]
                if over_s > now_s:
                    heappush(self._heap, (over_s, stage))
                    break
            else:
                heappush(self._heap, (now_s + seconds, stage))
                break
            position += 1
        else:
            self.end_s[stage] = now_s
        self._position[stage], self._since_s[stage] = position, now_s

    def _is_done(self, stage: int, now_s: float) -> bool:
        """Whether what the stage is at is over; it stands at the next operation then."""
        code, item, _ = self._ops[stage][self._position[stage]]
        if code in (COMPUTE, PAUSE):
            if code == COMPUTE and self._slows[stage]:
                left_s = self._goal_s[stage] - self._advanced_s(stage, now_s)
                if left_s > _NEGLIGIBLE_S:
                    heappush(self._heap, (self._expected_end_s(stage, left_s, now_s), stage))
                    return False
            self.spans[stage].append((item, self._since_s[stage], now_s))
        elif now_s > self._since_s[stage]:
            self.waits[stage].append((code, item, self._since_s[stage], now_s))
        self._position[stage] += 1
        return True

    def _begin_compute(self, stage: int, seconds: float, now_s: float) -> None:
        if self._slows[stage]:
            self._goal_s[stage] = self._advanced_s(stage, now_s) + seconds
            heappush(self._heap, (self._expected_end_s(stage, seconds, now_s), stage))
        else:
            heappush(self._heap, (now_s + seconds, stage))

    def _advanced_s(self, stage: int, now_s: float) -> float:
        """What a compute that had run all the time would have done by now."""
        return (
            now_s
            - self._transfer_loss * self._pipe[stage].busy_s(now_s)
            - self._data_loss[stage] * self._data[stage].busy_s(now_s)
        )

    def _expected_end_s(self, stage: int, left_s: float, now_s: float) -> float:
        """When `left_s` of work are done if nothing more begins beside it."""
        pipe_s, data_s = self._pipe[stage].until_s, self._data[stage].until_s
        for until_s in (pipe_s, data_s) if pipe_s < data_s else (data_s, pipe_s):
            if until_s <= now_s:
                continue
            speed = 1.0
            if pipe_s > now_s:
                speed -= self._transfer_loss
            if data_s > now_s:
                speed -= self._data_loss[stage]
            if left_s <= (until_s - now_s) * speed:
                return now_s + left_s / speed
            left_s -= (until_s - now_s) * speed
            now_s = until_s
        return now_s + left_s

    def _start_collective(self, stage: int, item: int, seconds: float, now_s: float) -> None:
        stream = self._data[stage]
        begin_s = max(now_s, stream.until_s)
        stream.add(begin_s, begin_s + seconds)
        assert item == len(self.data_spans[stage]), (item, len(self.data_spans[stage]))
        self.data_spans[stage].append((item, begin_s, begin_s + seconds))

    # ------------------------------------------------------------ transfers

    def _post(self, transfer: int, now_s: float) -> None:
        self._missing[transfer] -= 1
        if not self._missing[transfer]:
            self.met_s[transfer] = now_s
            if not self._is_blocked[transfer]:
                self._begin_or_queue(transfer, now_s)

    def _begin_or_queue(self, transfer: int, now_s: float) -> None:
        stages = self._stages[transfer]
        if len(stages) == 2:
            source, destination = stages
            if self._sends[source] or self._receives[destination]:
                self._to_send[source].append(transfer)
                self._to_receive[destination].append(transfer)
                return
            self._sends[source] = self._receives[destination] = True
        self._begin_transfer(transfer, now_s)

    def _begin_transfer(self, transfer: int, now_s: float) -> None:
        end_s = now_s + self._seconds[transfer]
        self.begin_s[transfer] = now_s
        for stage in self._stages[transfer]:
            self._pipe[stage].add(now_s, end_s)
        heappush(self._heap, (end_s, self._count + transfer))

    def _end_transfer(self, transfer: int, now_s: float) -> None:
        self._is_over[transfer] = True
        stages = self._stages[transfer]
        if len(stages) == 2:
            self._free_links(*stages, now_s)
        following = self._following[transfer]
        if following >= 0:
            self._is_blocked[following] = False
            if not self._missing[following]:
                self._begin_or_queue(following, now_s)
        for stage in stages:
            if self._waits_for[stage] == transfer:
                self._waits_for[stage] = -1
                self._is_done(stage, now_s)
                self._advance(stage, now_s)

    def _free_links(self, source: int, destination: int, now_s: float) -> None:
        self._sends[source] = self._receives[destination] = False
        for queued in (*self._to_send[source], *self._to_receive[destination]):
            begins, ends = self._stages[queued]
            if not (self._sends[begins] or self._receives[ends]):
                self._sends[begins] = self._receives[ends] = True
                self._to_send[begins].remove(queued)
                self._to_receive[ends].remove(queued)
                self._begin_transfer(queued, now_s)


def _blocked(following: list[int]) -> list[bool]:
    blocked = [False] * len(following)
    for after in following:
        if after >= 0:
            blocked[after] = True
    return blocked
