"""Messages between the ranks of a load: each wait has a deadline, and a peer that is gone a name.

Gloo says that a connection was closed, and not by whom. Here every wait is for one peer, so the
error names it. For a peer that failed once nobody waits any more; one that was only silent is still
told things, in case it lives.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint.agree import Ranks
from megascale.errors import CheckpointError

_FOR_EVER = timedelta(days=30)
_PROBE = (1 << 20) + 2  # a tag of its own
_LEAST_S = 1.0  # what has arrived is taken also after the deadline, on a busy machine too


class PeerGoneError(CheckpointError):
    """Rank `peer` died, or said nothing for too long."""

    def __init__(self, peer: int, message: str) -> None:
        super().__init__(message)
        self.peer = peer


@dataclass(frozen=True)
class Message:
    """One in flight; its tensor must not be touched before `Messages.wait`."""

    peer: int
    tensor: Tensor
    work: dist.Work


class _Waiter:
    """Waits on a thread of its own, so that who asked can do something meanwhile, and stop waiting.

    A timeout of gloo's own would close the connections to all peers, and who is missing could not
    be told to anybody. A thread that waits in vain is left behind, with the message.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="wait for a rank").start()

    def begin(self, work: dist.Work) -> None:
        self._asked.put(work)

    def has_ended(self, timeout_s: float) -> bool:
        """Raises what gloo raised. After False: ask again, or give this waiter up."""
        try:
            error = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if error is not None:
            raise error
        return True

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
    """Sends and receives of uint8 tensors over `ranks.group`.

    patience_s  for each wait
    meanwhile   called some ten times in this time, during waits
    """

    def __init__(self, ranks: Ranks, patience_s: float) -> None:
        self.ranks = ranks
        self.patience_s = patience_s
        self.meanwhile: Callable[[], None] = lambda: None
        self._waiter = _Waiter()
        self._gone: dict[int, PeerGoneError] = {}
        self._closed: set[int] = set()  # of them, those whose connection is
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

    def wait(self, message: Message, patience_s: float | None = None) -> None:
        """Until it has gone out or come in. Raises PeerGoneError."""
        if message.peer in self._gone:  # or it would wait in vain
            self._abandoned.append(message)
            raise self._gone[message.peer]
        patience_s = self.patience_s if patience_s is None else patience_s
        deadline_s = time.monotonic() + max(patience_s, _LEAST_S)
        self._waiter.begin(message.work)
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                if self._waiter.has_ended(min(left_s, self.patience_s / 10)):
                    return
                self.meanwhile()
        except RuntimeError as error:
            self._abandoned.append(message)
            raise self._lost_connection(message.peer) from error
        self._waiter = _Waiter()
        self._abandoned.append(message)
        raise self._lost(message.peer, f"said nothing for {self.patience_s:.0f} s")

    def _post(self, post: Callable[[], dist.Work | None], tensor: Tensor, peer: int) -> Message:
        if peer in self._closed:
            raise self._gone[peer]
        try:
            work = post()
        except RuntimeError as error:
            raise self._lost_connection(peer) from error
        assert work is not None, "this rank is not of the group"
        return Message(peer, tensor, work)

    def _lost_connection(self, peer: int) -> PeerGoneError:
        self._closed.add(peer)
        return self._lost(peer, "is gone (its connection was closed)")

    def _lost(self, peer: int, what: str) -> PeerGoneError:
        text = f"rank {peer} of {self.ranks.num_ranks} {what}; look at its log and its node"
        return self._gone.setdefault(peer, PeerGoneError(peer, text))


def lost_peers(ranks: Ranks) -> list[PeerGoneError]:
    """Ranks whose connection is closed, after a collective failed and did not say of whom: each is
    sent a byte, which nobody takes, so the group is of no use afterwards."""
    messages, lost = Messages(ranks, 5.0), list[PeerGoneError]()
    for peer in range(ranks.num_ranks):
        if peer != ranks.rank:
            try:
                messages.wait(messages.send(torch.zeros(1, dtype=torch.uint8), peer, _PROBE))
            except PeerGoneError as error:
                lost.append(error)
    messages.close()
    return lost
