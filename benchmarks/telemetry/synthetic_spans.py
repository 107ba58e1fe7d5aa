"""The spans of a synthetic step as columns of the store's table, for all ranks at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.telemetry.synthetic_program import Program
from benchmarks.telemetry.synthetic_times import SPAN_OF, TRANSFER_SHARE, Layout, Times
from megascale.plan.actions import ActionKind
from megascale.telemetry.store.segments import arrow_schema

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_TEXTS = ("name", "clock", "stream", "op", "group", "payload", "bucket", "work")
_NUMBERS = {
    "step": -1,
    "t0_ns": -1,
    "dur_ns": -1,
    "chunk": -1,
    "micro_batch": -1,
    "seq": -1,
    "peer": -1,
    "num_bytes": -1,
    "issued_ns": -1,
}
LEAD_S = 0.05  # by which the host is ahead of the device
POST_S = 20e-6
ACTIVATION_BYTES, BUCKET_BYTES = 64 << 20, 1 << 30


class SpanTable:
    """Grows by many ranks' spans of one kind at a time."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, dict[str, Any]]] = []

    def add(self, rank_R: Integers, begin_ns: Any, dur_ns: Any, **fields: Any) -> None:
        """A span of every rank of `rank_R`; values are arrays over them or for all of them."""
        own = {"rank": rank_R, "t0_ns": begin_ns, "dur_ns": dur_ns, "clock": "device", **fields}
        self._parts.append((len(rank_R), own))

    def table(self, start: int) -> Any:
        import pyarrow

        schema = arrow_schema("spans")
        total = sum(number for number, _ in self._parts)
        columns: dict[str, Any] = {
            "start": pyarrow.array(np.full(total, start, np.int32)),
            "derived": pyarrow.nulls(total, pyarrow.bool_()),
        }
        for name in ("rank", *_NUMBERS):
            values = np.concatenate(
                [np.broadcast_to(np.int64(0) + part.get(name, -1), (n,)) for n, part in self._parts]
            )
            type_ = schema.field(name).type
            columns[name] = pyarrow.array(values, mask=values < 0).cast(type_)
        for name in _TEXTS:
            vocabulary: dict[str, int] = {}
            codes = np.concatenate(
                [_codes(vocabulary, part.get(name), n) for n, part in self._parts]
            )
            texts = pyarrow.array(list(vocabulary), pyarrow.string())
            indices = pyarrow.array(codes, mask=codes < 0)
            columns[name] = pyarrow.DictionaryArray.from_arrays(indices, texts).cast("string")
        return pyarrow.table([columns[name] for name in schema.names], schema=schema)


def _codes(vocabulary: dict[str, int], text: str | None, number: int) -> NDArray[np.int32]:
    code = -1 if text is None else vocabulary.setdefault(text, len(vocabulary))
    return np.full(number, code, np.int32)


def add_step(
    spans: SpanTable,
    layout: Layout,
    program: Program,
    times: Times,
    at: int,
    step: int,
    begin_ns: int,
) -> None:
    """The spans of row `at` of `times`, which is step number `step` and begins at `begin_ns`."""
    writer = _Step(spans, layout, program, times, at, step, begin_ns)
    writer.pipeline()
    writer.collectives()


class _Step:
    def __init__(
        self,
        spans: SpanTable,
        layout: Layout,
        program: Program,
        times: Times,
        at: int,
        step: int,
        begin_ns: int,
    ) -> None:
        self._spans, self._times, self._program, self._at = spans, times, program, at
        self._step, self._begin_ns, self._mesh = step, begin_ns, layout.mesh
        self._transfer_s = TRANSFER_SHARE * layout.compute_s
        self._usual_s = layout.compute_s
        self._ranks = np.arange(layout.mesh.world_size)

    def _ns(self, seconds: Any) -> Integers:
        return self._begin_ns + np.rint(np.asarray(seconds) * 1e9).astype(np.int64)

    def _add(self, ranks: Integers, begin: Any, end: Any, name: str, **fields: Any) -> None:
        begin_ns, end_ns = self._ns(begin), self._ns(end)
        # the host is ahead, but not of the step's begin; what it launches late it launches then
        issued_ns = np.maximum(self._begin_ns, begin_ns - round(LEAD_S * self._usual_s * 1e9))
        fields = {"issued_ns": issued_ns, "stream": "compute", **fields}
        self._spans.add(ranks, begin_ns, end_ns - begin_ns, name=name, step=self._step, **fields)

    def _row(self, values: Floats) -> Floats:
        """[R] of [S, P, D, T] at this step."""
        mesh = self._mesh
        whole = np.broadcast_to(
            values[min(self._at, len(values) - 1)], (mesh.pipeline, mesh.data, mesh.tensor)
        )
        return whole.reshape(-1)

    def pipeline(self) -> None:
        mesh, times, program = self._mesh, self._times, self._program
        per_stage = mesh.data * mesh.tensor
        number_of: dict[tuple[int, ActionKind], int] = {}
        before: dict[int, Floats] = {}
        for compute, begins, ends, readies in zip(
            program.computes, times.begins, times.ends, times.ready, strict=True
        ):
            stage, action = compute.stage, compute.action
            ranks = np.arange(stage * per_stage, (stage + 1) * per_stage)
            begin, end, ready = (
                np.repeat(array[self._at], mesh.tensor) for array in (begins, ends, readies)
            )
            free = before.get(stage, self._row(times.data_end)[ranks])
            place = {"chunk": action.chunk, "micro_batch": action.micro_batch}
            if compute.feeder is not None:
                self._transfer(compute.feeder.kind, compute, ranks, ready, free)
                kind = "RA" if action.kind is ActionKind.FORWARD else "RG"
                self._add(ranks, free, begin, "pp_wait", op=kind, **place)
            self._add(ranks, begin, end, SPAN_OF[action.kind], **place)
            if stage not in before:
                gathered = begin + self._row(times.phases["param_gather"])[ranks]
                self._add(ranks, begin, gathered, "param_gather", op="wait", bucket="chunk0")
            if mesh.tensor > 1:
                number = number_of.get((stage, action.kind), 0)
                number_of[stage, action.kind] = number + 1
                self._tensor(action.kind, ranks, begin, end, number, place)
            before[stage] = end

    def _transfer(
        self, kind: ActionKind, compute: Any, ranks: Integers, ready: Floats, free: Floats
    ) -> None:
        """The value that feeds `compute`: a send at its source, a receive here."""
        program, mesh = self._program, self._mesh
        feeder = compute.feeder
        source, here = program.shape.stage_of(feeder.chunk), compute.stage
        if source == here:
            return
        payload = "activation" if kind is ActionKind.FORWARD else "gradient"
        per_stage = mesh.data * mesh.tensor
        other = ranks + (source - here) * per_stage
        num = program.shape.micro_batches * program.shape.chunks_per_stage
        shared = {
            "op": payload,
            "group": f"{source}->{here} {payload}",
            "seq": self._step * num + feeder.micro_batch,
            "stream": "pipeline",
            "num_bytes": ACTIVATION_BYTES,
            "payload": payload,
            "micro_batch": feeder.micro_batch,
        }
        sent = ready - self._transfer_s
        self._add(other, sent, ready, "send", peer=ranks, chunk=feeder.chunk, **shared)
        action = compute.action
        posted = np.minimum(free, sent)
        self._add(ranks, posted, ready, "recv", peer=other, chunk=action.chunk, **shared)

    def _tensor(
        self,
        kind: ActionKind,
        ranks: Integers,
        begin: Floats,
        end: Floats,
        number: int,
        place: dict[str, int],
    ) -> None:
        """One span for all tensor-parallel operators of a compute, at its end: what a rank waits
        for the slowest of its tensor ranks, and the communication itself."""
        name = "tp_gemm_reduce_scatter" if kind is ActionKind.FORWARD else "tp_row_backward"
        share = self._row(self._times.phases[name])[ranks]
        kinds = [k for k in self._program.kinds if (k is ActionKind.FORWARD) is (name[3] == "g")]
        num = self._times.counts[name] * len(kinds)
        op = "reduce_scatter" if kind is ActionKind.FORWARD else "all_gather"
        offset = 0 if kind is ActionKind.FORWARD else num
        seq = self._step * 2 * num + offset + number
        waited = np.minimum(share / self._times.counts[name] / len(kinds), end - begin)
        self._add(ranks, end - waited, end, name, op=op, group="tensor", seq=seq, **place)

    def collectives(self) -> None:
        times, ranks, row, step = self._times, self._ranks, self._row, self._step
        start = row(np.zeros_like(times.data_end))
        wait_end = start + row(times.phases["data_wait"])
        self._add(ranks, start, wait_end, "data_wait", stream="host", clock="host", issued_ns=-1)
        pipeline_end, gc = row(times.pipeline_end), row(times.gc)
        if gc.any():
            some = np.flatnonzero(gc > 0)
            begin = pipeline_end[some]
            self._add(
                some, begin, begin + gc[some], "gc", stream="host", clock="host", issued_ns=-1
            )
        launch, gradient_end = row(times.launch), row(times.gradient_end)
        # who is not late launches ahead of the device; who is, when it comes to it
        lead = np.where(launch > pipeline_end, 0.0, LEAD_S * self._usual_s)
        post_end = np.minimum(launch + POST_S, gradient_end)
        fields = {"bucket": "chunk0", "issued_ns": self._ns(launch - lead)}
        group = {"group": "data", "seq": 2 * step, "stream": "data", "num_bytes": BUCKET_BYTES}
        name = "grad_sync"
        self._add(ranks, launch, post_end, name, op="reduce_scatter", **fields, **group)
        self._add(ranks, post_end, gradient_end, name, op="finish", bucket="chunk0")
        world_end, optimizer_end = row(times.world_end), row(times.optimizer_end)
        if self._mesh.world_size > 1:
            self._add(
                ranks,
                gradient_end,
                gradient_end + POST_S,
                "world_sums",
                op="all_reduce",
                group="world",
                seq=step,
                num_bytes=24,
            )
            self._add(ranks, gradient_end + POST_S, world_end, "world_sums", op="wait")
        self._add(ranks, world_end, optimizer_end, "optimizer")
        post_end = optimizer_end + POST_S
        group = {"group": "data", "seq": 2 * step + 1, "stream": "data", "num_bytes": BUCKET_BYTES}
        self._add(
            ranks,
            optimizer_end,
            post_end,
            "param_gather",
            op="all_gather",
            bucket="chunk0",
            **group,
        )
