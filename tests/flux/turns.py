"""A model of ranks that take turns through the slots of an arena; every interleaving is searched.

Every rank goes through the calls in order. A call begins, pushes to each peer (data, then flag),
waits for each peer (and resets the flag), and completes; pushes and waits of a call come in any
order. What a call received is read until `hold` calls later begin (0: until it completes). The
search visits every reachable state and returns what goes wrong first, with the steps that lead
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Call(NamedTuple):
    slot: int
    barrier: bool = False  # nothing is pushed before every rank has begun it


class _Rank(NamedTuple):
    completed: int
    begun: int  # completed, or one more
    pushed: frozenset[int]
    waited: frozenset[int]


_Flags = frozenset[tuple[int, int, int, int]]  # (owner, slot, source, call that set it)
_State = tuple[tuple[_Rank, ...], _Flags]


def turns(num_calls: int, num_slots: int) -> list[Call]:
    """The turns of an eager program."""
    return [Call(call % num_slots) for call in range(num_calls)]


@dataclass(frozen=True)
class Model:
    """`silent`: ranks for which nobody waits (a form that skips peers without rows)."""

    world_size: int
    calls: Sequence[Call]
    hold: int = 2
    silent: frozenset[int] = frozenset()

    def violation(self) -> str | None:
        """What can go wrong, or None if nothing can."""
        idle = _Rank(0, 0, frozenset(), frozenset())
        start: _State = ((idle,) * self.world_size, frozenset())
        came_from: dict[_State, tuple[_State, str] | None] = {start: None}
        todo = [start]
        while todo:
            state = todo.pop()
            following = list(self._following(state))
            if not following and any(r.completed < len(self.calls) for r in state[0]):
                return f"deadlock after {_path(came_from, state)}"
            for action, after in following:
                if isinstance(after, str):
                    return f"{after} after {_path(came_from, state)}, {action}"
                if after not in came_from:
                    came_from[after] = (state, action)
                    todo.append(after)
        return None

    def _following(self, state: _State) -> Iterator[tuple[str, _State | str]]:
        ranks, _ = state
        for me, rank in enumerate(ranks):
            if rank.begun == rank.completed:
                if rank.begun < len(self.calls):
                    begun = rank._replace(begun=rank.begun + 1)
                    yield f"{me} begins {rank.begun}", _moved(state, me, begun)
                continue
            if self.calls[rank.completed].barrier and any(r.begun < rank.begun for r in ranks):
                continue
            peers = frozenset(range(self.world_size)) - {me}
            for peer in peers - rank.pushed:
                yield f"{me} pushes to {peer}", self._push(state, me, peer)
            for peer in peers - self.silent - rank.waited:
                if found := self._wait(state, me, peer):
                    yield f"{me} has {peer}'s", found
            if rank.pushed == peers and rank.waited == peers - self.silent:
                done = _Rank(rank.begun, rank.begun, frozenset(), frozenset())
                yield f"{me} completes {rank.completed}", _moved(state, me, done)

    def _push(self, state: _State, me: int, peer: int) -> _State | str:
        ranks, flags = state
        call = ranks[me].completed
        slot = self.calls[call].slot
        last = max((c for c in range(call) if self.calls[c].slot == slot), default=None)
        if last is not None and not self._released(ranks[peer], last):
            return f"{me} overwrites what {peer} still reads of call {last}"
        if any(flag[:3] == (peer, slot, me) for flag in flags):
            return f"{me} sets a flag of {peer} that is set"
        pushed = ranks[me]._replace(pushed=ranks[me].pushed | {peer})
        return _moved(state, me, pushed, flags | {(peer, slot, me, call)})

    def _released(self, rank: _Rank, call: int) -> bool:
        return rank.completed > call if self.hold == 0 else rank.begun > call + self.hold

    def _wait(self, state: _State, me: int, peer: int) -> _State | str | None:
        ranks, flags = state
        call = ranks[me].completed
        for flag in flags:
            if flag[:3] == (me, self.calls[call].slot, peer):
                if flag[3] != call:
                    return f"{me} takes {peer}'s flag of call {flag[3]} for one of call {call}"
                waited = ranks[me]._replace(waited=ranks[me].waited | {peer})
                return _moved(state, me, waited, flags - {flag})
        return None

    def holding(self, hold: int) -> Model:
        return replace(self, hold=hold)


def _moved(state: _State, me: int, rank: _Rank, flags: _Flags | None = None) -> _State:
    ranks, old_flags = state
    return (*ranks[:me], rank, *ranks[me + 1 :]), old_flags if flags is None else flags


def _path(came_from: dict[_State, tuple[_State, str] | None], state: _State) -> str:
    steps: list[str] = []
    while (entry := came_from[state]) is not None:
        state, action = entry
        steps.append(action)
    return ", ".join(reversed(steps))
