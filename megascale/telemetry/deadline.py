"""At the deadline of a collective each rank itself records what it is in (MegaScale 5.2).

A thread of the rank looks at its recorder a few times per deadline. Where the rank has stood in one
collective or transfer for `after_s`, it writes one `events.Ongoing` and sees it into the file at
once, because nobody knows how long the process lives; another one only when the wait ends with an
error. A rank that is stopped, holds the interpreter's lock or is in the kernel says nothing, and
that is the point: the ranks without this record are the suspects. In a save, where who is done
waits for who still writes, the deadline is longer.

It costs a step nothing but a dictionary store an operation of a group (`Recorder.opened`). On a
device, marks are asked for only where no step has become known for the length of a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megascale.events import Ongoing
from megascale.telemetry.diagnose.hang import mesh_groups
from megascale.telemetry.recorder import Recorder
from megascale.telemetry.spans import OpenSpan
from megascale.telemetry.standing import Standing, computes, standing
from megascale.telemetry.writer import LineWriter
from megascale.topology import Mesh

_log = logging.getLogger(__name__)

_LOOKS = 8  # per deadline
_LEAST_S, _MOST_S = 0.02, 1.0  # between two looks
_JOIN_S = 5.0
_PATIENCE_IN_SAVES = 12  # deadlines: ranks write unequal shares, on disks that are shared
_MOST_CHARACTERS = 500  # of an error


class Deadline(threading.Thread):
    """Watches `recorder` of global rank `recorder.rank`. A context manager.

    after_s  how long a collective may take
    prepare  called first, on the thread: what makes the device its own
    """

    def __init__(
        self,
        recorder: Recorder,
        writer: LineWriter,
        mesh: Mesh,
        *,
        after_s: float,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name="deadline of collectives", daemon=True)
        self._recorder, self._writer, self._mesh = recorder, writer, mesh
        self._after_ns, self._prepare = int(after_s * 1e9), prepare
        self._interval_s = min(max(after_s / _LOOKS, _LEAST_S), _MOST_S)
        self._ended = threading.Event()
        self._told: OpenSpan | None = None
        self._moved_ns = time.monotonic_ns()
        self._oldest: object = None

    def __enter__(self) -> Deadline:
        self._recorder.on_failure = self._failed
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.on_failure = None
        self._ended.set()
        self.join(_JOIN_S)

    def run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while not self._ended.wait(self._interval_s):
            self._look(time.monotonic_ns())

    def _look(self, now_ns: int) -> None:
        found = self._standing(now_ns)
        if found is None or found.span is self._told:
            return
        patience = _PATIENCE_IN_SAVES if found.phase == "checkpoint" else 1
        if now_ns - found.since_ns < patience * self._after_ns:
            return
        self._told = found.span
        self._tell(found, now_ns)

    def _standing(self, now_ns: int) -> Standing | None:
        seen = self._recorder.under_way()
        if seen.clock.kind == "host":
            return standing(seen)
        if seen.oldest is not self._oldest:
            self._oldest, self._moved_ns = seen.oldest, now_ns
        if now_ns - self._moved_ns < self._after_ns:
            return None
        found = standing(seen)
        # Marks of a batch that was emitted meanwhile belong to other spans already.
        return found if self._recorder.under_way().oldest is seen.oldest else None

    def _failed(self, span: OpenSpan, error: BaseException) -> None:
        """An error leaves `span`, on the thread that it happened on: a collective, or a detail of
        one."""
        if not isinstance(error, Exception) or computes(span):
            return
        found = standing(self._recorder.under_way(), of_host=True)
        if found is not None:
            self._tell(found, time.monotonic_ns(), f"{type(error).__name__}: {error}")

    def _tell(self, found: Standing, now_ns: int, error: str | None = None) -> None:
        waited_ns = now_ns - found.since_ns
        self._writer(
            Ongoing(
                rank=self._recorder.rank,
                t_ns=now_ns,
                waited_ns=waited_ns,
                name=found.span.name,
                step=found.step,
                phase=found.phase,
                chunk=found.chunk,
                micro_batch=found.micro_batch,
                op=found.span.fields.get("op"),
                group=found.group,
                seq=found.seq,
                peers=peers(self._mesh, self._recorder.rank, found.group),
                posted=found.posted,
                error=None if error is None else error[:_MOST_CHARACTERS],
            )
        )
        self._writer.flush()
        number = "" if found.seq is None else f" {found.seq}"
        _log.warning(
            "rank %d %s %s of %s%s since %.1f s",
            self._recorder.rank,
            "is in" if error is None else "failed in",
            found.span.name,
            found.group,
            number,
            waited_ns / 1e9,
        )


def peers(mesh: Mesh, rank: int, group: str) -> tuple[int, ...]:
    """The other ranks of this rank's instance of `group`, or the other end of a channel."""
    if "->" in group:
        stages = [int(stage) for stage in group.split(" ", 1)[0].split("->")]
        place = mesh.coordinates(rank)
        other = stages[0] if stages[0] != place.pp_rank else stages[1]
        at = {"tp_rank": place.tp_rank, "dp_rank": place.dp_rank, "pp_rank": other}
        return (mesh.global_rank(**at),)
    members = next((m for m in mesh_groups(mesh).get(group, ()) if rank in m), ())
    return tuple(other for other in members if other != rank)
