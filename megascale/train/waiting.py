"""Training waits for a save: a span says for which operation, and the progress page that it moves.

Only then: what a save moves behind training must not make a step that hangs look alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megascale.telemetry.recorder import Recorder


class Waiting:
    """Of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._depth = 0

    @contextmanager
    def __call__(self, op: str) -> Iterator[None]:
        """The calling thread waits; `moved` counts meanwhile."""
        self._depth += 1
        try:
            with self._recorder.span("checkpoint", op=op, host=True):
                yield
        finally:
            self._depth -= 1
            self._recorder.moved(over=True)

    def moved(self) -> None:
        """A save has something more behind it. From any thread."""
        if self._depth:
            self._recorder.moved()
