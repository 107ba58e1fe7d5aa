"""A model of relays among ranks that take turns through slots; every interleaving is searched.

Beside `turns.py`, whose calls push to every peer: here a call has strands, sequences of steps that
run side by side (programs, copies), and completes when all have ended. A relay has a strand a tile:
on each hop it waits for its turn, puts the tile into the owner's slot, and tells the left
neighbour. An exchange is a call of another form: data and flag to every peer, a flag of every peer.

The search visits every reachable state and returns what goes wrong first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Step(NamedTuple):
    """Waits for and resets the own flag `wait`, puts data at `puts`, sets the flag `tells` of a
    rank, takes the own tile `takes`: one of these."""

    wait: str = ""
    puts: tuple[int, int] | None = None  # owner, tile
    tells: tuple[int, str] | None = None
    takes: int | None = None


Strand = tuple[Step, ...]


def relay(rank: int, world_size: int, tiles: int = 1, *, patient: bool = True) -> list[Strand]:
    """`patient`: whoever adds waits for its turn."""
    strands: list[Strand] = []
    for tile in range(tiles):
        steps: list[Step] = []
        for hop in range(1, world_size + 1):
            if hop == world_size or (hop > 1 and patient):
                steps.append(Step(wait=f"hop {hop - 1} of tile {tile}"))
            if hop == world_size:
                steps.append(Step(takes=tile))
            else:
                left = (rank - 1) % world_size
                steps.append(Step(puts=((rank + hop) % world_size, tile)))
                steps.append(Step(tells=(left, f"hop {hop} of tile {tile}")))
        strands.append(tuple(steps))
    return strands


def exchange(rank: int, world_size: int) -> list[Strand]:
    """A call of a form whose sources have places and flags of their own."""
    strands: list[Strand] = []
    for peer in range(world_size):
        if peer != rank:
            strands.append((Step(puts=(peer, -1)), Step(tells=(peer, f"of {rank}"))))
            strands.append((Step(wait=f"of {peer}"),))
    return strands


class _Rank(NamedTuple):
    """`call` is under way; `at`: the next step of each strand."""

    call: int
    at: tuple[int, ...]


_Put = tuple[int, int, int, int]  # owner, slot, tile, call that put the last thing there
_Come = tuple[int, int, int, tuple[int, ...]]  # owner, call, tile, who has put something, in order
_Flag = tuple[int, int, str, int]  # owner, slot, name, call that set it


class _State(NamedTuple):
    ranks: tuple[_Rank, ...]
    flags: frozenset[_Flag]
    come: frozenset[_Come]


@dataclass(frozen=True)
class Relays:
    """`calls`: of which kind each is. `holds`: calls for which an exchange's data is read on."""

    world_size: int
    calls: Sequence[Literal["relay", "exchange"]]
    num_slots: int
    tiles: int = 1
    hold: int = 0
    patient: bool = True

    def _strands(self, rank: int, call: int) -> list[Strand]:
        if self.calls[call] == "exchange":
            return exchange(rank, self.world_size)
        return relay(rank, self.world_size, self.tiles, patient=self.patient)

    def violation(self) -> str | None:
        """What can go wrong, or None if nothing can."""
        plan = [
            [self._strands(rank, call) for call in range(len(self.calls))]
            for rank in range(self.world_size)
        ]
        ranks = tuple(_Rank(0, (0,) * len(plan[rank][0])) for rank in range(self.world_size))
        start = _State(ranks, frozenset(), frozenset())
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            following = list(self._following(state, plan))
            done = all(rank.call == len(self.calls) for rank in state.ranks)
            if not following and not done:
                return f"deadlock: {state.ranks}, {sorted(state.flags)}"
            for after in following:
                if isinstance(after, str):
                    return after
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return None

    def _following(
        self, state: _State, plan: Sequence[Sequence[Sequence[Strand]]]
    ) -> Iterator[_State | str]:
        for me, rank in enumerate(state.ranks):
            if rank.call == len(self.calls):
                continue
            strands = plan[me][rank.call]
            for number, strand in enumerate(strands):
                if rank.at[number] == len(strand):
                    continue
                changed = self._after(state, me, rank.call, strand[rank.at[number]])
                if isinstance(changed, str):
                    yield changed
                elif changed is not None:
                    at = tuple(a + (i == number) for i, a in enumerate(rank.at))
                    moved = _Rank(rank.call, at)
                    if all(a == len(s) for a, s in zip(at, strands, strict=True)):
                        following = rank.call + 1
                        left = len(plan[me][following]) if following < len(self.calls) else 0
                        moved = _Rank(following, (0,) * left)
                    ranks = (*state.ranks[:me], moved, *state.ranks[me + 1 :])
                    yield changed._replace(ranks=ranks)

    def _after(self, state: _State, me: int, call: int, step: Step) -> _State | str | None:
        slot = call % self.num_slots
        if step.wait:
            found = next((f for f in state.flags if f[:3] == (me, slot, step.wait)), None)
            if found is None:
                return None
            if found[3] != call:
                return f"{me} takes flag {step.wait} of call {found[3]} for one of call {call}"
            return state._replace(flags=state.flags - {found})
        if step.tells is not None:
            flag = (step.tells[0], slot, step.tells[1])
            if any(f[:3] == flag for f in state.flags):
                return f"{me} sets flag {flag} that is set"
            return state._replace(flags=state.flags | {(*flag, call)})
        if step.takes is not None:
            wanted = tuple((me - hop) % self.world_size for hop in range(1, self.world_size))
            key = (me, call, step.takes, wanted)
            if key not in state.come:
                return f"{me} takes tile {step.takes} of call {call}, not in the order {wanted}"
            return state._replace(come=state.come - {key})
        return self._put(state, me, call, step)

    def _put(self, state: _State, me: int, call: int, step: Step) -> _State | str:
        assert step.puts is not None
        owner, tile = step.puts
        last = max((c for c in range(call) if (call - c) % self.num_slots == 0), default=None)
        if last is not None:
            hold = self.hold if self.calls[last] == "exchange" else 0
            if state.ranks[owner].call <= last + hold:
                return f"{me} overwrites what {owner} still reads of call {last}"
        if tile < 0:
            return state
        before = next((c for c in state.come if c[:3] == (owner, call, tile)), None)
        come = state.come if before is None else state.come - {before}
        who = () if before is None else before[3]
        return state._replace(come=come | {(owner, call, tile, (*who, me))})
