"""Jobs that hang, seeded: a small simulation of the trainer with one fault in it.

Every rank runs the program of `train/step.py` (data, pipeline schedule with its transfers, tensor
collectives inside the computations, gradient and parameter collectives that nobody waits for at
once, sums over the world, norms that are not on the page) and writes its page as the recorder does.
The fault stops a rank or lets it skip a collective, then everybody runs until nobody can. Where
stacks are asked for, they have the functions that real ranks were seen in.

    hang = plant(LAYOUTS["tp2-pp2-dp2"], "skip", seed=7)
    localise(hang.views, hang.groups, hang.stacks(range(8)))  # names hang.guilty
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from megascale.events import group_id
from megascale.telemetry.diagnose.hang import RankView, mesh_groups
from megascale.topology import Mesh
from tests.telemetry.diagnose import real_stacks
from tests.telemetry.diagnose.planted_program import LARGE, LAYOUTS, Layout, Op, stage_program

__all__ = ["KINDS", "LARGE", "LAYOUTS", "SKIPS", "Hang", "Layout", "plant"]

KINDS = ("stop", "skip", "unsent", "gil", "asleep", "two asleep", "dead", "silent", "frozen")
SKIPS = ("skip", "unsent")  # a collective, a send of the pipeline


@dataclass
class Hang:
    """What the driver would see, and the truth."""

    layout: Layout
    kind: str
    guilty: tuple[int, ...]
    views: dict[int, RankView]
    blocked: dict[int, Op]
    posted: dict[int, str]  # last collective in the tensor group
    groups: dict[str, list[tuple[int, ...]]]
    seed: int
    job: Job = field(repr=False)

    def where(self, rank: int) -> str:
        """What the rank stands in: a collective, a group, a channel, "norms" or "gathered"."""
        op = self.blocked[rank]
        if op.group == "tensor":
            return self.posted[rank]
        of_phase = {"norms": "norms", "gather": "gathered"}
        return of_phase.get(op.phase or "", op.group or "")

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """`py-spy dump` of those that have a process which can be read: no dead or frozen one."""
        return {
            rank: real_stacks.dump(
                self.kind if rank in self.guilty and self.kind not in SKIPS else "waits",
                self.where(rank),
                self.seed + rank,
            )
            for rank in ranks
            if rank in self.views and self.views[rank].alive
            if not (rank in self.guilty and self.kind == "frozen")
        }


def plant(layout: Layout, kind: str, seed: int, *, phase: str | None = None) -> Hang:
    """A job of `layout` that hangs by a fault of `kind` (one of KINDS), in `phase` if given."""
    rng = random.Random(seed)
    mesh = layout.mesh
    programs = [stage_program(layout, stage) for stage in range(mesh.pipeline)]
    guilty: tuple[int, ...] = (rng.randrange(mesh.world_size),)
    if kind == "two asleep":  # neighbours on a node, so often of one tensor group
        first = guilty[0] // 2 * 2
        guilty = (first, first + 1)
    first_step = rng.randrange(3, 2000)
    job = Job(layout, programs, rng, first_step)
    place_seed = rng.random()  # the same place for two of one stage
    for rank in guilty:
        program = programs[mesh.coordinates(rank).pp_rank]
        job.fault_at[rank] = _fault_place(
            random.Random(place_seed), program, kind, phase, _with_peers(mesh)
        )
    job.skips = kind in SKIPS
    job.counts_skipped = rng.random() < 0.5
    job.run()
    assert not job.is_done(), f"{layout}, {kind}, seed {seed}: nobody hangs"
    if kind not in SKIPS:  # of two stages, one may have kept the other from its fault
        guilty = tuple(r for r in guilty if job.ranks[r].index == job.fault_at[r])
    now_s = max(state.page_s for state in job.ranks) + rng.uniform(10, 30)
    views = {rank: state.view(now_s) for rank, state in enumerate(job.ranks)}
    for rank in guilty:
        if kind == "silent":
            del views[rank]
        else:
            state = {"stop": "T", "frozen": "D", "dead": None, "gil": "R"}.get(kind, "S")
            views[rank] = replace(views[rank], os_state=state, alive=kind != "dead")
    blocked = {rank: job.next_op(rank) for rank in range(mesh.world_size)}
    posted = {rank: state.last_tensor for rank, state in enumerate(job.ranks)}
    return Hang(layout, kind, guilty, views, blocked, posted, mesh_groups(mesh), seed, job)


# ---------------------------------------------------------------- where it goes wrong


def _fault_place(
    rng: random.Random,
    program: Sequence[Op],
    kind: str,
    phase: str | None,
    skippable: frozenset[str],
) -> int:
    """Index of an operation in the second step: the rank stops in front of it, or skips it."""
    second = range(len(program) // 3, 2 * len(program) // 3)
    if kind in SKIPS:
        wanted = ("send", None) if kind == "unsent" else ("post", skippable)
        meetings = [
            i
            for i in second
            if program[i].kind == wanted[0] and (wanted[1] is None or program[i].group in wanted[1])
        ]
        return rng.choice(meetings)
    phases = [phase] if phase else None
    if phases is None and kind != "stop" and kind != "dead":
        phases = ["forward", "backward", "backward_input", "optimizer", "data_wait"]
    places = [i + 1 for i in second if program[i].kind == "mark" and i + 1 < len(program)]
    if phases is not None:
        places = [i for i in places if program[i - 1].phase in phases]
    return rng.choice(places)


def _with_peers(mesh: Mesh) -> frozenset[str]:
    degrees = {"tensor": mesh.tensor, "data": mesh.data, "world": mesh.world_size}
    return frozenset(name for name, degree in degrees.items() if degree > 1)


# ---------------------------------------------------------------- running it

_INIT = Op("mark", "init")


@dataclass(slots=True)
class _Rank:
    rank: int
    step: int
    index: int = 0
    now_s: float = 0.0
    marked: Op = _INIT
    counted: Op | None = None
    page_s: float = 0.0
    numbers: Counter[str] = field(default_factory=Counter)  # of spans, as on the page
    posted: Counter[str] = field(default_factory=Counter)  # on the wire
    last_tensor: str = ""

    @property
    def page(self) -> dict[str, object]:
        op, counted = self.marked, self.counted
        page: dict[str, object] = {"phase": op.phase}
        if op is not _INIT:
            page |= {"chunk": op.chunk, "micro_batch": op.micro_batch}
        if counted is not None and counted.group is not None:
            page |= {"group_id": group_id(counted.group), "seq": self.numbers[counted.group]}
        return page

    def view(self, now_s: float) -> RankView:
        age_s = now_s - self.page_s
        return RankView(epoch=4, step=self.step, age_s=age_s, os_state="S", **self.page)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Meeting:
    size: int
    names: set[str] = field(default_factory=set)
    arrived: int = 0
    done_s: float = 0.0
    waiters: list[int] = field(default_factory=list)
    is_over: bool = False

    def arrive(self, name: str, now_s: float) -> None:
        self.arrived += 1
        self.names.add(name)
        self.done_s = max(self.done_s, now_s)
        self.is_over = self.arrived == self.size and len(self.names) == 1


class Job:
    def __init__(
        self, layout: Layout, programs: list[tuple[Op, ...]], rng: random.Random, first_step: int
    ) -> None:
        self.mesh, self.programs, self.rng = layout.mesh, programs, rng
        self.first_step = first_step
        self.ranks = [_Rank(rank, first_step) for rank in range(self.mesh.world_size)]
        self.stage = [self.mesh.coordinates(r).pp_rank for r in range(self.mesh.world_size)]
        self.members: dict[str, dict[int, tuple[int, int]]] = {}
        for name, instances in mesh_groups(self.mesh).items():
            self.members[name] = {
                rank: (number, len(one)) for number, one in enumerate(instances) for rank in one
            }
        self.meetings: dict[tuple[str, int, int], _Meeting] = {}
        self.fault_at: dict[int, int] = {}
        self.skips = self.counts_skipped = False
        self.ready: deque[int] = deque(range(self.mesh.world_size))

    def next_op(self, rank: int) -> Op:
        program = self.programs[self.stage[rank]]
        return program[min(self.ranks[rank].index, len(program) - 1)]

    def is_done(self) -> bool:
        """Did every rank reach the end of its program?"""
        return all(r.index >= len(self.programs[self.stage[r.rank]]) for r in self.ranks)

    def run(self) -> None:
        while self.ready:
            state = self.ranks[self.ready.popleft()]
            program = self.programs[self.stage[state.rank]]
            fault_at = self.fault_at.get(state.rank, -1)
            skipped, stops_at = self._fault(fault_at)
            while state.index < len(program):
                if state.index == stops_at:
                    break
                op = program[state.index]
                if state.index in skipped:
                    pass
                elif op.kind == "mark":
                    self._mark(state, op)
                elif not self._do(state, op):
                    break
                state.index += 1

    def _fault(self, fault_at: int) -> tuple[tuple[int, ...], int]:
        """Operations that the rank leaves out, the collective and perhaps its span in front of it,
        and the one that it never comes to."""
        if fault_at < 0 or not self.skips:
            return (), fault_at
        return ((fault_at,) if self.counts_skipped else (fault_at - 1, fault_at)), -1

    def _do(self, state: _Rank, op: Op) -> bool:
        """False: the rank must wait."""
        assert op.group is not None, op
        meeting = self._meeting(state, op)
        if op.kind in ("post", "send"):
            state.last_tensor = op.name if op.group == "tensor" else state.last_tensor
            meeting.arrive(op.name, state.now_s)
            if meeting.is_over:
                self.ready.extend(meeting.waiters)
                meeting.waiters.clear()
            return True
        if op.kind == "wait" and not state.posted[op.group]:
            return True  # of the step before the first
        if not meeting.is_over:
            meeting.waiters.append(state.rank)
            return False
        if op.kind == "await":
            state.posted[f"taken {op.group}"] += 1
        state.now_s = max(state.now_s, meeting.done_s)
        return True

    def _meeting(self, state: _Rank, op: Op) -> _Meeting:
        assert op.group is not None, op
        if "->" in op.group:
            instance, size = self.members["pipeline"][state.rank][0], 1
        else:
            instance, size = self.members[op.group][state.rank]
        if op.kind in ("post", "send"):
            state.posted[op.group] += 1
        number = state.posted[op.group]
        if op.kind == "await":
            number = state.posted[f"taken {op.group}"] + 1
        key = (op.group, instance, number)
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = _Meeting(size)
        return meeting

    def _mark(self, state: _Rank, op: Op) -> None:
        if op.phase == "data_wait":
            state.step += 1
        state.page_s = state.now_s
        if op.phase is not None:
            state.marked = op
        if op.group is not None:
            state.numbers[op.group] += 1
            state.counted = op
        if op.cost_s:
            state.now_s += op.cost_s * self.rng.uniform(0.9, 1.1)
