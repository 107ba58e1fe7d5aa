"""What all ranks of a group do together: succeed all, or raise the same error all.

A rank that raises alone leaves its peers waiting in a collective until the timeout. Here each rank
reports how its part ended before anyone goes on. Rank 0 of the group is *the writer*: it alone
makes directories, writes manifests and commits. Without a group, one process is all ranks.

Whoever is done waits here for who is not, perhaps for ever: `waits_in` has each wait be a span.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_Enclose = Callable[[], AbstractContextManager[object]]
_enclose: ContextVar[_Enclose] = ContextVar("enclose", default=nullcontext)


@contextmanager
def waits_in(enclose: _Enclose) -> Iterator[None]:
    """Every wait of this thread for other ranks is inside of a fresh `enclose()`."""
    token = _enclose.set(enclose)
    try:
        yield
    finally:
        _enclose.reset(token)


def enclosed() -> AbstractContextManager[object]:
    """What a wait for other ranks happens inside of, on this thread."""
    return _enclose.get()()


class Ranks:
    """The ranks of `group` (any backend that carries objects; gloo avoids device memory)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)

    @property
    def is_writer(self) -> bool:
        return self.rank == 0

    def gather(self, part: Callable[[], T]) -> list[T]:
        """Run `part` on every rank; all results, by rank, on every rank.

        Raises CheckpointError on all ranks if it raised on any, once all have ended.
        """
        cause: Exception | None = None
        value: T | None = None
        try:
            value = part()
        except Exception as error:  # a boundary between processes: the peers wait for our word
            logger.debug("rank %d failed", self.rank, exc_info=True)
            cause = error
        outcomes = self._all_gather((value, explain(cause) if cause else None))
        failures = {rank: message for rank, (_, message) in enumerate(outcomes) if message}
        if failures:
            raise CheckpointError(summarize(failures, self.num_ranks)) from cause
        return [value for value, _ in outcomes]

    def gather_at_writer(self, part: Callable[[], T]) -> list[T]:
        """As `gather`, but only the writer has the results; [] on the others. For what is large."""
        value: list[T] = []
        self.gather(lambda: value.append(part()))
        if self.group is None:
            return value
        values: list[Any] = [None] * self.num_ranks
        with enclosed():
            dist.gather_object(
                value[0], values if self.is_writer else None, group=self.group, group_dst=0
            )
        return values if self.is_writer else []

    def writer_does(self, part: Callable[[], T]) -> T:
        """Run `part` on the writer alone; its result on every rank."""
        return self.gather(lambda: part() if self.is_writer else None)[0]  # type: ignore[return-value]

    def _all_gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        with enclosed():
            dist.all_gather_object(values, value, group=self.group)
        return values


def explain(error: BaseException) -> str:
    """One line for the person who meets it. A full disk is looked for behind what torch says."""
    for link in _chain(error):
        if isinstance(link, CheckpointError):
            return str(link)
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                "the disk is full; free space or lower checkpoint.keep_latest_k. Nothing was "
                "committed, older checkpoints are untouched, training can go on"
            )
    return f"{type(error).__name__}: {error}"


def summarize(failures: dict[int, str], num_ranks: int) -> str:
    """The first failing rank's message, and how many ranks more."""
    first = min(failures)
    if num_ranks == 1:
        return failures[first]
    more = f" (and {len(failures) - 1} ranks more)" if len(failures) > 1 else ""
    return f"rank {first} of {num_ranks}: {failures[first]}{more}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
