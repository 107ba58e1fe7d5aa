"""Python's own garbage collections as spans, `gc_pause` (MegaScale 6.3: they come irregularly, on
one rank at a time, and the others wait in the next collective).

Only full collections: they take milliseconds where a program has many objects, and are rare. A
collection that the loop itself asks for is a span of its own, `gc`, and of the younger objects.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

from megascale.telemetry.recorder import Recorder
from megascale.telemetry.spans import OpenSpan

FULL = 2  # the generation that holds everything


class GarbagePauses:
    """Records them while its context is entered."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._span: OpenSpan | None = None

    def __enter__(self) -> GarbagePauses:
        gc.callbacks.append(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] != FULL:
            return
        if phase == "start":
            self._span = self._recorder.span("gc_pause", host=True).start()
        elif self._span is not None:
            self._span.end()
            self._span = None
