"""A model of ranks that take turns through the slots of an arena; every interleaving is searched.

Every rank goes through the calls in order. A call begins, pushes to each peer (data, then flag),
waits for each peer (and resets the flag), and completes; pushes and waits of a call come in any
order. What a call received is read until the call `hold` calls later begins (0: until it
completes). The search visits every reachable state and returns what goes wrong first, with the
steps that lead there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Call(NamedTuple):
    """`barrier`: nothing is pushed before every rank has begun it. `late`: calls that may begin
    before it completes (an all-gather that is started and waited for after another operator).
    `hold`: of this call, where it is not the model's."""

    slot: int
    barrier: bool = False
    late: int = 0
    hold: int | None = None


class _Open(NamedTuple):
    """A call that has begun and not completed: peers it has pushed to and waited for."""

    call: int
    pushed: frozenset[int] = frozenset()
    waited: frozenset[int] = frozenset()


class _Rank(NamedTuple):
    begun: int  # calls
    open: tuple[_Open, ...] = ()


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
        start: _State = ((_Rank(0),) * self.world_size, frozenset())
        came_from: dict[_State, tuple[_State, str] | None] = {start: None}
        todo = [start]
        while todo:
            state = todo.pop()
            following = list(self._following(state))
            if not following and any(r.open or r.begun < len(self.calls) for r in state[0]):
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
            if self._may_begin(rank):
                begun = _Rank(rank.begun + 1, (*rank.open, _Open(rank.begun)))
                yield f"{me} begins {rank.begun}", _moved(state, me, begun)
            peers = frozenset(range(self.world_size)) - {me}
            for at in rank.open:
                if self.calls[at.call].barrier and any(r.begun <= at.call for r in ranks):
                    continue
                for peer in peers - at.pushed:
                    yield f"{me} pushes {at.call} to {peer}", self._push(state, me, peer, at)
                for peer in peers - self.silent - at.waited:
                    if found := self._wait(state, me, peer, at):
                        yield f"{me} has {at.call} of {peer}", found
                if at.pushed == peers and at.waited == peers - self.silent:
                    left = tuple(other for other in rank.open if other != at)
                    yield f"{me} completes {at.call}", _moved(state, me, _Rank(rank.begun, left))

    def _may_begin(self, rank: _Rank) -> bool:
        in_time = all(at.call + self.calls[at.call].late >= rank.begun for at in rank.open)
        return rank.begun < len(self.calls) and in_time

    def _push(self, state: _State, me: int, peer: int, at: _Open) -> _State | str:
        ranks, flags = state
        slot = self.calls[at.call].slot
        last = max((c for c in range(at.call) if self.calls[c].slot == slot), default=None)
        if last is not None and not self._released(ranks[peer], last):
            return f"{me} overwrites what {peer} still reads of call {last}"
        if any(flag[:3] == (peer, slot, me) for flag in flags):
            return f"{me} sets a flag of {peer} that is set"
        after = at._replace(pushed=at.pushed | {peer})
        return _moved(state, me, _with(ranks[me], after), flags | {(peer, slot, me, at.call)})

    def _released(self, rank: _Rank, call: int) -> bool:
        own = self.calls[call].hold
        hold = self.hold if own is None else own
        if hold == 0:
            return rank.begun > call and all(at.call != call for at in rank.open)
        return rank.begun > call + hold

    def _wait(self, state: _State, me: int, peer: int, at: _Open) -> _State | str | None:
        ranks, flags = state
        for flag in flags:
            if flag[:3] == (me, self.calls[at.call].slot, peer):
                if flag[3] != at.call:
                    return f"{me} takes {peer}'s flag of call {flag[3]} for one of call {at.call}"
                after = at._replace(waited=at.waited | {peer})
                return _moved(state, me, _with(ranks[me], after), flags - {flag})
        return None

    def holding(self, hold: int) -> Model:
        return replace(self, hold=hold)


def _with(rank: _Rank, after: _Open) -> _Rank:
    return _Rank(rank.begun, tuple(after if at.call == after.call else at for at in rank.open))


def _moved(state: _State, me: int, rank: _Rank, flags: _Flags | None = None) -> _State:
    ranks, old_flags = state
    return (*ranks[:me], rank, *ranks[me + 1 :]), old_flags if flags is None else flags


def _path(came_from: dict[_State, tuple[_State, str] | None], state: _State) -> str:
    steps: list[str] = []
    while (entry := came_from[state]) is not None:
        state, action = entry
        steps.append(action)
    return ", ".join(reversed(steps))
