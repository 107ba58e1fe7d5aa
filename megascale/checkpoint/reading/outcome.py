"""How a load ended, agreed by all ranks through rank 0, in messages that name who is missing.

A collective would hang, or tell its neighbours alone, where a rank has died. Here every rank sends
its outcome to rank 0 and is answered with what all raise: two messages of fixed size a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

from megascale.checkpoint.agree import Ranks, summarize
from megascale.checkpoint.reading.messages import Messages, PeerGoneError
from megascale.checkpoint.reading.window import DamagedError
from megascale.errors import CheckpointError

T = TypeVar("T")
_TAG = 1 << 20  # above those of blocks
_BYTES = 2048


class Kind(IntEnum):
    GOOD = 0
    STOPPED = 1  # because another rank failed
    DAMAGED = 2  # another checkpoint may be whole
    FAILED = 3


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    text: str = ""

    def encode(self) -> Tensor:
        data = bytes([self.kind]) + self.text.encode()[: _BYTES - 1]
        return torch.frombuffer(bytearray(data.ljust(_BYTES, b"\0")), dtype=torch.uint8)

    @staticmethod
    def decode(tensor: Tensor) -> Outcome:
        data = bytes(tensor.tolist())
        return Outcome(Kind(data[0]), data[1:].rstrip(b"\0").decode(errors="ignore"))

    def raise_if_bad(self) -> None:
        if self.kind == Kind.DAMAGED:
            raise DamagedError(self.text)
        if self.kind != Kind.GOOD:
            raise CheckpointError(self.text)


def agree(own: Outcome, messages: Messages, grace_s: float) -> Outcome:
    """Collective; never raises. What all ranks that are left make of it.

    grace_s  by which rank 0 gives up before the others, who hear from it who is missing
    """
    if messages.ranks.num_ranks == 1:
        return own
    answer = _collect if messages.ranks.rank == 0 else _ask
    return answer(own, messages, grace_s)


def judge(outcomes: dict[int, Outcome], num_ranks: int) -> Outcome:
    """Of several the gravest kind; the text of the first of that kind, and how many more."""
    kind = max(outcome.kind for outcome in outcomes.values())
    if kind == Kind.GOOD:
        return Outcome(Kind.GOOD)
    failures = {rank: o.text for rank, o in sorted(outcomes.items()) if o.kind == kind}
    return Outcome(kind, summarize(failures, num_ranks))


def _ask(own: Outcome, messages: Messages, grace_s: float) -> Outcome:
    verdict = torch.empty(_BYTES, dtype=torch.uint8)
    try:
        sent = messages.send(own.encode(), 0, _TAG)
        messages.wait(messages.receive(verdict, 0, _TAG + 1), grace_s)
        messages.wait(sent, grace_s)
    except PeerGoneError as error:
        # what this rank saw itself says more than that rank 0 is gone too
        return own if own.kind > Kind.STOPPED else Outcome(Kind.FAILED, str(error))
    return Outcome.decode(verdict)


def _collect(own: Outcome, messages: Messages, grace_s: float) -> Outcome:
    outcomes = {0: own}
    posted = {}
    for peer in range(1, messages.ranks.num_ranks):
        told = torch.empty(_BYTES, dtype=torch.uint8)
        try:
            posted[peer] = messages.receive(told, peer, _TAG)
        except PeerGoneError as error:
            outcomes[peer] = Outcome(Kind.FAILED, str(error))
    for peer, message in posted.items():
        try:
            messages.wait(message)
            outcomes[peer] = Outcome.decode(message.tensor)
        except PeerGoneError as error:
            outcomes[peer] = Outcome(Kind.FAILED, str(error))
    verdict = judge(outcomes, messages.ranks.num_ranks)
    answers = []
    for peer in posted:
        try:
            answers.append(messages.send(verdict.encode(), peer, _TAG + 1))
        except PeerGoneError:  # it is in the verdict, or died after its word: the next step tells
            continue
    for answer in answers:
        try:
            messages.wait(answer, grace_s)
        except PeerGoneError:
            continue
    return verdict


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
