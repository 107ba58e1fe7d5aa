"""How the layers of this package report what they do: a callable that opens a span.

`telemetry.Recorder.span` is one; `no_span` is the other. Nothing here knows about recorders.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Span(Protocol):
    """Opens a span: `with span("dp_reduce_scatter", bucket="chunk0.layers.3"): ...`."""

    def __call__(self, name: str, /, **fields: Any) -> AbstractContextManager[Any]: ...


def no_span(_name: str, /, **_fields: Any) -> AbstractContextManager[Any]:
    """The span of a program that records nothing."""
    return nullcontext()
