"""Messages between the ranks of a load: each wait has a deadline, and a peer that is gone a name.

Gloo says that a connection was closed, and not by whom. Here every wait is for one peer, so the
error names it. To a peer that failed once nothing is sent any more: gloo has closed the connection
(it does so after a timeout too, and the other side then sees this one as gone).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint.agree import Ranks
from megascale.errors import CheckpointError


class PeerGoneError(CheckpointError):
    """A rank died, or was not heard of until the deadline."""


@dataclass(frozen=True)
class Message:
    """One in flight; its tensor must not be touched before `Messages.wait`."""

    peer: int
    tensor: Tensor
    work: dist.Work


class Messages:
    """Sends and receives of uint8 tensors over `ranks.group`, until `deadline_s` (monotonic)."""

    def __init__(self, ranks: Ranks, deadline_s: float) -> None:
        self.ranks = ranks
        self._deadline_s = deadline_s
        self._gone: dict[int, str] = {}
        self._abandoned: list[Message] = []  # gloo may still write to them

    def seconds_left(self, grace_s: float = 0.0) -> float:
        return max(self._deadline_s + grace_s - time.monotonic(), 0.01)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return self._post(
            lambda: dist.isend(tensor, group=self.ranks.group, group_dst=peer, tag=tag),
            tensor,
            peer,
        )

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return self._post(
            lambda: dist.irecv(tensor, group=self.ranks.group, group_src=peer, tag=tag),
            tensor,
            peer,
        )

    def wait(self, message: Message, grace_s: float = 0.0) -> None:
        """Until it has gone out or come in. Raises PeerGoneError."""
        if message.peer in self._gone:  # or it would wait for its own deadline
            self._abandoned.append(message)
            raise PeerGoneError(self._gone[message.peer])
        began_s = time.monotonic()
        try:
            message.work.wait(timedelta(seconds=self.seconds_left(grace_s)))
        except RuntimeError as error:
            self._abandoned.append(message)
            raise self._lost(message.peer, error, time.monotonic() - began_s) from error

    def _post(self, post: Callable[[], dist.Work | None], tensor: Tensor, peer: int) -> Message:
        if peer in self._gone:
            raise PeerGoneError(self._gone[peer])
        try:
            work = post()
        except RuntimeError as error:
            raise self._lost(peer, error, 0.0) from error
        assert work is not None, "this rank is not of the group"
        return Message(peer, tensor, work)

    def _lost(self, peer: int, error: RuntimeError, waited_s: float) -> PeerGoneError:
        told = str(error).splitlines()[0]
        what = (
            f"said nothing for {waited_s:.0f} s"
            if "imed out" in told
            else "is gone (its connection was closed)"
        )
        self._gone[peer] = (
            f"rank {peer} of {self.ranks.num_ranks} {what}; look at its log and its node"
        )
        return PeerGoneError(self._gone[peer])
