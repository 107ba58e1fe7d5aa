"""What spans say on the progress page: where the host is, and what has completed (MegaScale 5)."""

from __future__ import annotations

import time
from dataclasses import replace

from megascale.events import PHASES, Completed, Issued, ProgressWriter, group_id
from megascale.telemetry.spans import OpenSpan


class PageReports:
    """Keeps the page of a rank: the phase from spans that are phases (`PHASES`), the last
    collective from spans of a group, each as it was while the other changes."""

    def __init__(self, page: ProgressWriter, epoch: int) -> None:
        self._page, self._epoch = page, epoch
        self._last = Issued(epoch, 0, "init", 0)

    def started(self, span: OpenSpan, step: int | None) -> None:
        """The host has begun `span`, which may be neither of the two: then it still lives."""
        last, fields = self._last, span.fields
        is_phase, is_collective = span.name in PHASES, fields.get("group") is not None
        self._last = Issued(
            epoch=self._epoch,
            step=step or 0,
            phase=span.name if is_phase else last.phase,
            monotonic_ns=span.since_ns,
            chunk=fields.get("chunk") if is_phase else last.chunk,
            micro_batch=fields.get("micro_batch") if is_phase else last.micro_batch,
            group_id=group_id(fields["group"]) if is_collective else last.group_id,
            seq=fields["seq"] if is_collective else last.seq,
        )
        self._page.issued(self._last)

    def moved(self, *, over: bool) -> None:
        """The save under way has moved something more, or is `over`."""
        saved = None if over else (self._last.saved or 0) + 1
        self._last = replace(self._last, monotonic_ns=time.monotonic_ns(), saved=saved)
        self._page.issued(self._last)

    def ended(self, span: OpenSpan, step: int | None) -> None:
        """The work of `span` is done."""
        if span.name in PHASES:
            chunk, micro_batch = span.fields.get("chunk"), span.fields.get("micro_batch")
            self._page.completed(Completed(step or 0, span.name, chunk, micro_batch))
