"""What a simulated step looks like: spans by stage and lane, and where each stage's time goes.

A step in the steady state, from one agreement on the gradients' norm to the next: the optimizer and
the gathers of parameters that it starts, loading, the pipeline, the last reductions. At the
agreement all stages meet, so a step is exactly one period.

The parts of a stage sum to the step. Where a stage waits for a transfer, it is a bubble until both
ends are ready, and exposed communication from then on. At the end it is a bubble until the last
stage has computed, whatever reduces meanwhile; what is reduced after that is exposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

from megascale.plan.prices import Spent
from megascale.plan.simulate.engine import Engine, TimedSpan
from megascale.plan.simulate.program import NEED, Label, Program

COMPUTE_LANE, DATA_LANE, HOST_LANE = "compute", "data", "host"
_ON_HOST = ("load", "fixed")


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """Something that a stage does from begin to end; spans of a lane never overlap.

    lane      "compute", "data", "host", "head", or what is sent or received: "send activation"
    kind      as the recorder names it: "forward", "backward", "send", "grad_sync", "optimizer", ...
    transfer  the number of the transfer whose end this is
    """

    stage: int
    lane: str
    kind: str
    chunk: int | None
    micro_batch: int | None
    start_s: float
    end_s: float
    what: str = ""
    transfer: int | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class StageParts:
    """Seconds of a stage's step, by what they go to; they sum to the step.

    tensor_s     tensor-parallel communication that nothing hides
    slowed_s     what computes lose beside communication
    transfer_s   exposed transfers between stages
    bubble_s     waiting for other stages to compute
    data_s       exposed data-parallel communication
    embedding_s  the all-reduce of tied embeddings
    """

    gemm_s: float
    attention_s: float
    memory_s: float
    tensor_s: float
    launch_s: float
    slowed_s: float
    transfer_s: float
    bubble_s: float
    data_s: float
    embedding_s: float
    update_s: float
    load_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def compute_s(self) -> float:
        """Of the model's computes, without what slows them."""
        return self.gemm_s + self.attention_s + self.memory_s + self.tensor_s + self.launch_s


@dataclass(frozen=True)
class Timeline:
    """A simulated step; nothing here was measured.

    pipeline_end_s  when the last stage was through its action list
    """

    step_s: float
    pipeline_end_s: float
    parts: tuple[StageParts, ...]
    _program: Program = field(repr=False)
    _engine: Engine = field(repr=False)
    _embedding: tuple[float, float] | None = field(repr=False)

    @property
    def num_stages(self) -> int:
        return len(self.parts)

    @property
    def bubble_share(self) -> float:
        """Of the step, the mean over stages."""
        return sum(parts.bubble_s for parts in self.parts) / (self.num_stages * self.step_s)

    @property
    def mean_parts(self) -> dict[str, float]:
        """By name: seconds, the mean over stages."""
        return {
            part.name: sum(getattr(p, part.name) for p in self.parts) / self.num_stages
            for part in fields(StageParts)
        }

    def chunks_of(self, stage: int) -> list[int]:
        """Chunks that the stage computes, in order of number; a shared head's is the last."""
        labels = self._program.stages[stage].labels
        return sorted({label.chunk for label in labels if label.chunk is not None})

    def spans(self, stage: int) -> list[SimulatedSpan]:
        """Of all lanes, each in the order of time."""
        return [*self._computes(stage), *self._transfers(stage), *self._collectives(stage)]

    def _computes(self, stage: int) -> Iterator[SimulatedSpan]:
        """What was cut at the borders of buckets is one span again, unless it was kept waiting."""
        labels = self._program.stages[stage].labels
        joined: list[TimedSpan] = []
        for label, begin_s, end_s in self._engine.spans[stage]:
            if joined and joined[-1][0] == label and joined[-1][2] == begin_s:
                joined[-1] = (label, joined[-1][1], end_s)
            else:
                joined.append((label, begin_s, end_s))
        for label, begin_s, end_s in joined:
            lane = HOST_LANE if labels[label].kind in _ON_HOST else COMPUTE_LANE
            yield _span(stage, lane, labels[label], begin_s, end_s)

    @cached_property
    def _transfers_of(self) -> list[list[int]]:
        """By stage, the numbers of its transfers."""
        found: list[list[int]] = [[] for _ in self.parts]
        for number, stages in enumerate(self._program.transfers.stages):
            for stage in stages:
                found[stage].append(number)
        return found

    def _transfers(self, stage: int) -> Iterator[SimulatedSpan]:
        table = self._program.transfers
        found = []
        for number in self._transfers_of[stage]:
            stages = table.stages[number]
            label, begin_s = table.labels[number], self._engine.begin_s[number]
            end_s = begin_s + table.seconds[number]
            if label.kind == "transfer":
                kind = "send" if stages[0] == stage else "recv"
                lane = f"{kind} {label.what}"
                label = label._replace(kind=kind, chunk=_own_chunk(label, kind))
            else:
                lane = label.what
            found.append(_span(stage, lane, label, begin_s, end_s, number))
        yield from sorted(found, key=lambda span: (span.lane, span.start_s))

    def _collectives(self, stage: int) -> Iterator[SimulatedSpan]:
        items = self._program.stages[stage].items
        for item, begin_s, end_s in self._engine.data_spans[stage]:
            yield _span(stage, DATA_LANE, items[item], begin_s, end_s)
        if self._embedding is not None and stage in (0, self.num_stages - 1):
            yield _span(stage, DATA_LANE, Label("tied_sum"), *self._embedding)


def _own_chunk(label: Label, kind: str) -> int:
    """Of the stage at this end. The label says the sender's."""
    assert label.chunk is not None, label
    if kind == "send":
        return label.chunk
    return label.chunk + 1 if label.what == "activation" else label.chunk - 1


def _span(
    stage: int, lane: str, label: Label, start_s: float, end_s: float, transfer: int | None = None
) -> SimulatedSpan:
    kind, chunk, micro_batch, what = label
    return SimulatedSpan(
        stage, lane, kind, chunk, micro_batch, start_s, end_s, what=what, transfer=transfer
    )


def timeline_of(
    program: Program, engine: Engine, spent: list[Spent], embedding_s: float
) -> Timeline:
    """spent  by stage, what its computes take alone; the optimizer is not among them"""
    pipeline_end_s = max(engine.end_s)
    reduced_s = [
        max([end_s, *(span[2] for span in spans[-1:])])
        for end_s, spans in zip(engine.end_s, engine.data_spans, strict=True)
    ]
    data_end_s = max(reduced_s)
    embedding = None
    step_s = data_end_s
    if embedding_s > 0.0:
        begin_s = max(reduced_s[0], reduced_s[-1])
        embedding = begin_s, begin_s + embedding_s
        step_s = max(step_s, embedding[1])
    parts = tuple(
        _parts(
            program,
            engine,
            stage,
            spent[stage],
            ends=(pipeline_end_s, data_end_s, step_s),
        )
        for stage in range(len(program.stages))
    )
    return Timeline(step_s, pipeline_end_s, parts, program, engine, embedding)


def _parts(
    program: Program,
    engine: Engine,
    stage: int,
    spent: Spent,
    *,
    ends: tuple[float, float, float],
) -> StageParts:
    """ends  of the pipeline, of the last reduction, of the step"""
    labels = program.stages[stage].labels
    took = dict.fromkeys(("optimizer", "load", "fixed"), 0.0)
    computed_s = 0.0
    for label, begin_s, end_s in engine.spans[stage]:
        kind = labels[label].kind
        if kind in took:
            took[kind] += end_s - begin_s
        else:
            computed_s += end_s - begin_s
    bubble_s = transfer_s = data_s = 0.0
    for code, item, begin_s, end_s in engine.waits[stage]:
        if code != NEED:
            data_s += end_s - begin_s
            continue
        ready_s = min(max(engine.met_s[item], begin_s), end_s)
        bubble_s += ready_s - begin_s
        transfer_s += end_s - ready_s
    pipeline_end_s, data_end_s, step_s = ends
    return StageParts(
        gemm_s=spent.gemm_s,
        attention_s=spent.attention_s,
        memory_s=spent.memory_s,
        tensor_s=spent.tensor_s,
        launch_s=spent.launch_s,
        slowed_s=computed_s - spent.total_s,
        transfer_s=transfer_s,
        bubble_s=bubble_s + pipeline_end_s - engine.end_s[stage],
        data_s=data_s + data_end_s - pipeline_end_s,
        embedding_s=step_s - data_end_s,
        update_s=took["optimizer"],
        load_s=took["load"],
        fixed_s=took["fixed"],
    )
