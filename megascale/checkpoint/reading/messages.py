"""Messages between the ranks of a load: each wait has a deadline, and a peer that is gone a name.

Gloo says that a connection was closed, and not by whom. Here every wait is for one peer, so the
error names it. To a peer that failed once nothing is sent any more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint.agree import Ranks
from megascale.errors import CheckpointError

_FOR_EVER = timedelta(days=30)
_LEAST_S = 0.01  # what has arrived is taken also after the deadline
_CLOSED = "is gone (its connection was closed)"


class PeerGoneError(CheckpointError):
    """A rank died, or was not heard of until the deadline."""


@dataclass(frozen=True)
class Message:
    """One in flight; its tensor must not be touched before `Messages.wait`."""

    peer: int
    tensor: Tensor
    work: dist.Work


class _Waiter:
    """Waits on a thread of its own, so that who asked can stop waiting.

    A timeout of gloo's own would close the connections to all peers, and who is missing could not
    be told to anybody. A thread that waits in vain is left behind, with the message.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="wait for a rank").start()

    def wait(self, work: dist.Work, timeout_s: float) -> None:
        """Raises TimeoutError, after which this waiter is lost, or what gloo raises."""
        self._asked.put(work)
        try:
            error = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                work.wait(_FOR_EVER)
                self._answers.put(None)
            except RuntimeError as error:
                self._answers.put(error)


class Messages:
    """Sends and receives of uint8 tensors over `ranks.group`, until `deadline_s` (monotonic)."""

    def __init__(self, ranks: Ranks, deadline_s: float) -> None:
        self.ranks = ranks
        self.deadline_s = deadline_s
        self._waiter = _Waiter()
        self._gone: dict[int, str] = {}
        self._abandoned: list[Message] = []  # gloo may still write to them

    def close(self) -> None:
        self._waiter.close()

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
            seconds_left = self.deadline_s + grace_s - began_s
            self._waiter.wait(message.work, max(seconds_left, _LEAST_S))
        except TimeoutError:
            self._waiter = _Waiter()
            self._abandoned.append(message)
            what = f"said nothing for {time.monotonic() - began_s:.0f} s"
            raise self._lost(message.peer, what) from None
        except RuntimeError as error:
            self._abandoned.append(message)
            raise self._lost(message.peer, _CLOSED) from error

    def _post(self, post: Callable[[], dist.Work | None], tensor: Tensor, peer: int) -> Message:
        if peer in self._gone:
            raise PeerGoneError(self._gone[peer])
        try:
            work = post()
        except RuntimeError as error:
            raise self._lost(peer, _CLOSED) from error
        assert work is not None, "this rank is not of the group"
        return Message(peer, tensor, work)

    def _lost(self, peer: int, what: str) -> PeerGoneError:
        self._gone[peer] = (
            f"rank {peer} of {self.ranks.num_ranks} {what}; look at its log and its node"
        )
        return PeerGoneError(self._gone[peer])
