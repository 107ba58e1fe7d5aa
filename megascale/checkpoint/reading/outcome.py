"""How a load ended, agreed by all ranks through rank 0, in messages that name who is missing.

A collective would hang, or tell its neighbours alone, where a rank has died. Here every rank sends
its outcome to rank 0 and is answered with what all raise. A load from a slow storage takes as long
as it takes: whoever still reads says so now and then, rank 0 to all and all to rank 0, so that only
a rank that says nothing is given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

from megascale.checkpoint.agree import Ranks, explain, summarize
from megascale.checkpoint.reading.messages import Message, Messages, PeerGoneError
from megascale.checkpoint.reading.window import DamagedError
from megascale.errors import CheckpointError

T = TypeVar("T")
_TAG = 1 << 20  # above those of blocks
_BYTES = 2048  # of a message


class Kind(IntEnum):
    READING = 0  # no outcome yet
    GOOD = 1
    STOPPED = 2  # because another rank failed
    MISSES = 3  # another rank: see `peer`
    DAMAGED = 4  # another checkpoint may be whole
    FAILED = 5


@dataclass(frozen=True)
class Outcome:
    """peer: whom a rank that MISSES one has not heard of."""

    kind: Kind
    text: str = ""
    peer: int = 0

    @staticmethod
    def of(error: Exception) -> Outcome:
        if isinstance(error, PeerGoneError):
            return Outcome(Kind.MISSES, str(error), error.peer)
        kind = Kind.DAMAGED if isinstance(error, DamagedError) else Kind.FAILED
        return Outcome(kind, explain(error))

    def encode(self) -> Tensor:
        data = bytes([self.kind]) + self.peer.to_bytes(4, "little") + self.text.encode()
        padded = data[:_BYTES].ljust(_BYTES, b"\0")
        return torch.frombuffer(bytearray(padded), dtype=torch.uint8)

    @staticmethod
    def decode(tensor: Tensor) -> Outcome:
        data = tensor.numpy().tobytes()
        text = data[5:].rstrip(b"\0").decode(errors="ignore")
        return Outcome(Kind(data[0]), text, int.from_bytes(data[1:5], "little"))

    def raise_if_bad(self) -> None:
        if self.kind == Kind.DAMAGED:
            raise DamagedError(self.text)
        if self.kind != Kind.GOOD:
            raise CheckpointError(self.text)


def judge(outcomes: dict[int, Outcome], silent: dict[int, Outcome], num_ranks: int) -> Outcome:
    """What all raise, of what the ranks told and of those that told nothing.

    A rank that is gone comes first. Whoever misses one that has told its own outcome only waited
    for it in vain: what that one told is nearer to the cause.
    """
    if silent:
        return Outcome(Kind.FAILED, silent[min(silent)].text)
    told = {rank: o for rank, o in outcomes.items() if o.kind != Kind.MISSES}
    kind = max((outcome.kind for outcome in told.values()), default=Kind.GOOD)
    missed = [o for o in outcomes.values() if o.kind == Kind.MISSES]
    if kind <= Kind.STOPPED and missed:
        return Outcome(Kind.FAILED, missed[0].text)
    if kind == Kind.GOOD:
        return Outcome(Kind.GOOD)
    failures = {rank: o.text for rank, o in sorted(told.items()) if o.kind == kind}
    return Outcome(kind, summarize(failures, num_ranks))


class Agreement:
    """The ends of one load's conversation with rank 0. None of its methods raises."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        ranks = messages.ranks
        self._peers = range(1, ranks.num_ranks) if ranks.is_writer else range(1)
        self._tag = _TAG + ranks.is_writer  # of what this rank sends
        self._sent: list[Message] = []
        self._last_s = time.monotonic()
        self._concluding = ranks.num_ranks == 1
        messages.meanwhile = self.still_reading

    def still_reading(self) -> None:
        """Tell it, if it was not told for a while."""
        now_s = time.monotonic()
        if not self._concluding and now_s - self._last_s > self._messages.patience_s / 10:
            self._last_s = now_s
            self._tell(Outcome(Kind.READING))

    def conclude(self, own: Outcome) -> Outcome:
        """Collective. What all ranks that are left make of it."""
        if self._messages.ranks.num_ranks == 1:
            return own
        verdict = self._collect(own) if self._messages.ranks.is_writer else self._ask(own)
        for message in self._sent:
            with contextlib.suppress(PeerGoneError):  # the verdict has it, or the next step will
                self._messages.wait(message)
        return verdict

    def _tell(self, outcome: Outcome) -> None:
        for peer in self._peers:
            with contextlib.suppress(PeerGoneError):
                self._sent.append(self._messages.send(outcome.encode(), peer, self._tag))

    def _ask(self, own: Outcome) -> Outcome:
        self._concluding = True
        self._tell(own)
        # rank 0 may be about to give up the others, one after the other
        verdict = self._hear(0, _TAG + 1, 1.2 * self._messages.patience_s)
        if verdict.kind == Kind.MISSES:
            # what this rank saw itself says more than that rank 0 is gone too
            return own if own.kind > Kind.STOPPED else Outcome(Kind.FAILED, verdict.text)
        return verdict

    def _collect(self, own: Outcome) -> Outcome:
        outcomes, silent = {0: own}, dict[int, Outcome]()
        until_s = time.monotonic() + self._messages.patience_s
        for peer in self._peers:
            outcome = self._hear(peer, _TAG, until_s - time.monotonic())
            is_silent = (outcome.kind, outcome.peer) == (Kind.MISSES, peer)
            (silent if is_silent else outcomes)[peer] = outcome
        verdict = judge(outcomes, silent, self._messages.ranks.num_ranks)
        self._concluding = True
        self._tell(verdict)
        return verdict

    def _hear(self, peer: int, tag: int, patience_s: float) -> Outcome:
        """What `peer` told at last; that it is missed where it says nothing for `patience_s`."""
        while True:
            told = torch.empty(_BYTES, dtype=torch.uint8)
            try:
                self._messages.wait(self._messages.receive(told, peer, tag), patience_s)
            except PeerGoneError as error:
                return Outcome.of(error)
            outcome = Outcome.decode(told)
            if outcome.kind != Kind.READING:
                return outcome
            patience_s = self._messages.patience_s


def gather(ranks: Ranks, part: Callable[[], T]) -> list[T]:
    """`Ranks.gather` that raises DamagedError where damage is all that went wrong."""

    def guarded() -> tuple[list[T], str]:
        try:
            return [part()], ""
        except DamagedError as error:
            return [], str(error)

    told = ranks.gather(guarded)
    damaged = {rank: text for rank, (_, text) in enumerate(told) if text}
    if damaged:
        raise DamagedError(summarize(damaged, ranks.num_ranks))
    return [value for values, _ in told for value in values]
