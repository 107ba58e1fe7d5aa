"""Which of two waiting ranks is further in the program, from their records (`ongoing.py`)."""

from __future__ import annotations

from megascale.events import Ongoing

_PARTS = {"optimizer": 3, "grad_sync": 2, "data_wait": 0}
"""The part of a step by phase; what is not here lies in the pipeline's body, part 1."""

_BETWEEN_STEPS = frozenset({"agreement", "replica_sums"})


def since_ns(record: Ongoing) -> int:
    """When the wait began."""
    return record.t_ns - record.waited_ns


def place(record: Ongoing) -> tuple[object, ...]:
    """Equal for two ranks that stand in the same operation of their program."""
    return (record.step, record.name, record.op, record.phase, record.chunk, record.micro_batch)


def is_further(one: Ongoing, other: Ongoing) -> bool:
    """Is `one` past the place where `other` waits? By step, by the part of the step, by what a
    stage must have sent before it waits for its answer; where none of these says, by time: who left
    something out went on until it needed something itself, so it began to wait last."""
    first, second = (one.step or 0, _part(one)), (other.step or 0, _part(other))
    if first != second:
        return first > second
    if _has_sent(one, other) or _has_sent(other, one):
        return _has_sent(one, other)
    if (one.phase, one.chunk) == (other.phase, other.chunk) and _both_counted(one, other):
        return (one.micro_batch or 0) > (other.micro_batch or 0)
    if one.group == other.group and one.seq is not None and other.seq not in (None, one.seq):
        return one.seq > other.seq
    return since_ns(one) > since_ns(other)


def _both_counted(one: Ongoing, other: Ongoing) -> bool:
    numbers = one.micro_batch, other.micro_batch
    return None not in numbers and numbers[0] != numbers[1]


def _part(record: Ongoing) -> int:
    if record.name in _BETWEEN_STEPS:
        return 5
    if record.name == "param_gather":
        return 4 if record.op == "all_gather" else 1
    if record.name == "grad_sync" and record.op != "finish":
        return 1  # it is posted inside of backward
    return _PARTS.get(record.phase or "", 1)


def _has_sent(one: Ongoing, other: Ongoing) -> bool:
    """A stage has sent a micro-batch's activation before it waits for its gradient. So where `one`
    waits for a gradient and `other`, a stage behind, for an activation not later than that, `one`
    is past the send. False: nobody knows."""
    if (one.op, other.op) != ("RG", "RA") or one.chunk is None or other.chunk != one.chunk + 1:
        return False
    return (one.micro_batch or 0) >= (other.micro_batch or 0)
