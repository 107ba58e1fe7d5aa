"""Debug mode: a call that does not end says who is missing.

Without it a rank that never calls leaves the others waiting, as with every collective. With a
deadline each call

1. answers a roll call over the group's store before anything is launched: a rank that does not
   come within the deadline is named, and so is one that calls something else, has other settings,
   or refuses the call;
2. has a deadline in every spin of a kernel, which ends in a report and a trap (`signals.py`);
3. waits for its own end, so that the error is raised by the call that it belongs to.

Cost: some round trips to the store (about a millisecond) and the loss of all asynchrony. It cannot
be captured into a CUDA graph. After a trap the CUDA context is lost: the process has to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError

# By name of the group: the group, and calls of all its operators so far, those refused too. A group
# that is made anew under the same name has another store, and peers that may be new.
_calls: dict[str, tuple[dist.ProcessGroup, int]] = {}
_REFUSED = "refused: "


class Deadline:
    """The deadline of an operator's calls among the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, deadline_s: float) -> None:
        self._group = group
        self._deadline_s = deadline_s
        self._rank, self._world_size = dist.get_rank(group), group.size()

    def roll_call(self, op: str, describe: Callable[[], str]) -> None:
        """All ranks have come to this call and were given the same. Raises FluxError otherwise.

        describe  says what must be equal on all ranks; where it raises, the peers are told
        """
        number, store = self._next(), self._group.get_group_store()
        keys = [f"flux/{number}/{rank}" for rank in range(self._world_size)]
        try:
            _refuse_capture()
            description = describe()
        except Exception as error:
            store.set(keys[self._rank], f"{_REFUSED}{error}")
            raise
        store.set(keys[self._rank], description)
        try:
            store.wait(keys, timedelta(seconds=self._deadline_s))
        except RuntimeError:  # DistStoreError of a TCPStore is one; a FileStore raises it plain
            come = {rank: key for rank, key in enumerate(keys) if store.check([key])}
            if len(come) == len(keys):
                raise
            _hear_refusals(op, number, {r: store.get(key).decode() for r, key in come.items()})
            late = [rank for rank in range(self._world_size) if rank not in come]
            store.set(keys[self._rank], f"gone, after {self._deadline_s} s without ranks {late}")
            raise FluxError(
                f"{op}: of {self._world_size} ranks {late} did not call within "
                f"{self._deadline_s} s (flux call {number} of rank {self._rank}); see their logs: "
                "they failed, or run another sequence of calls"
            ) from None
        found = [store.get(key).decode() for key in keys]
        _hear_refusals(op, number, dict(enumerate(found)))
        if len(set(found)) > 1:
            raise FluxError(
                f"flux call {number} differs between ranks: "
                + "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(found))
                + ". Every rank must make the same calls in the same order"
            )
        # Whoever is in call n has left the roll call of n - 1, so nobody reads that of n - 2.
        store.delete_key(f"flux/{number - 2}/{self._rank}")

    def refused(self, error: FluxError) -> None:
        """Tell the peers, in place of a roll call, that this rank refuses what it was given."""
        key = f"flux/{self._next()}/{self._rank}"
        self._group.get_group_store().set(key, f"{_REFUSED}{error}")

    def _next(self) -> int:
        """The number of this call: taken first, so that a refusal counts on every rank."""
        name = self._group.group_name
        group, number = _calls.get(name, (self._group, 0))
        number = number + 1 if group is self._group else 1
        _calls[name] = self._group, number
        return number

    @contextmanager
    def watch(self, op: str, report: Tensor | None) -> Iterator[None]:
        """Wait for the end of what was launched inside; FluxError where it does not come.

        report  of the arena; None where there is none (the reference)
        """
        try:
            yield
            if torch.cuda.is_initialized():
                self._wait(op)
        except RuntimeError as error:
            waited = None if report is None else decoded(report.tolist())
            if waited is None:
                raise
            raise FluxError(
                f"{op}: rank {self._rank} waited {self._deadline_s} s for {waited}; see its log. "
                "The CUDA context of this process is lost: end it"
            ) from error

    def _wait(self, op: str) -> None:
        """Poll: a kernel's own deadline begins when it starts, so the host waits longer."""
        end = torch.cuda.Event()
        end.record()
        limit_s = 2 * self._deadline_s + 1
        start = time.monotonic()
        while not end.query():
            if time.monotonic() - start > limit_s:
                raise FluxError(
                    f"{op}: rank {self._rank} launched it and it did not end within {limit_s} s; a "
                    "transfer of a peer is missing: see the logs of the other ranks, and end this "
                    "process"
                )
            time.sleep(1e-4)


def _refuse_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise FluxError(
            "deadline_s makes a call wait for its end, which a CUDA graph cannot capture; make "
            "the operator without it for the capture"
        )


def _hear_refusals(op: str, number: int, said: dict[int, str]) -> None:
    refused = [
        f"rank {rank} refused it: {text.removeprefix(_REFUSED)}"
        for rank, text in said.items()
        if text.startswith(_REFUSED)
    ]
    if refused:
        raise FluxError(f"{op}: flux call {number} was not made; {'; '.join(refused)}")


def decoded(report: Sequence[int]) -> str | None:
    """What a kernel's report says that it waited for; None where it says nothing."""
    ran_out, source, tile = report[:3]
    if not ran_out:
        return None
    if tile < 0:
        return f"rank {source} in the barrier that begins a call"
    return f"the flag of tile {tile} from rank {source}"
