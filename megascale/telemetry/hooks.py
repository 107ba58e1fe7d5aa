"""The hook interface of a run: what others may do when a step, checkpoint or incident happens.

A hook is called on the thread of the loop and may not wait for a device. An error in a hook is an
error of the run.
"""

from __future__ import annotations

from megascale.events import Incident, Span, Step, Sums


class Hook:
    """Override what you need; every method does nothing here."""

    def on_step_start(self, step: int) -> None: ...

    def on_step_end(self, step: int) -> None:
        """The host is done with the step; the device may not be."""

    def on_step_timed(self, step: Step, sums: Sums) -> None:
        """The step's times are known, which on a device is some steps later."""

    def on_span(self, span: Span) -> None:
        """A span of a sampled step."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint of `step` is committed at `path`."""

    def on_incident(self, incident: Incident) -> None: ...
