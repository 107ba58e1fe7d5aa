"""Collectives that do nothing: the same step without its communication. For measurements alone.

While `silenced` is open, the functions of torch.distributed that move tensors return at once and
move nothing, and so do the references to them that this package keeps. Shapes, streams and memory
are those of the real ones; values are not. Outputs are filled, with the rank's own input or with
noise, because GEMMs of zeros or of numbers that are none run at other clocks: in a step each time,
in a span `silent_fill` whose time is not the step's; where the same few operators run over and
over, once for each piece of memory.

So losses are meaningless, and nothing may be trained like this: only the bench opens it, on runs
that it throws away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux import collectives
from megascale.parallel.spans import Span, no_span


class _Done:
    """The work of a collective that did nothing."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Silence:
    """What stands in for each function. Without a `span`, memory is filled once."""

    def __init__(self, span: Span | None) -> None:
        self._span = span
        self._filled: set[tuple[int, int]] = set()

    def in_place(self, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
        return _Done() if async_op else None

    def into(
        self, out: Tensor, source: Tensor | None = None, *_: Any, async_op: bool = False, **__: Any
    ) -> _Done | None:
        self._fill(out, source)
        return _Done() if async_op else None

    def receive(self, tensor: Tensor, *_: Any, **__: Any) -> _Done:
        self._fill(tensor, None)
        return _Done()

    def send(self, *_: Any, **__: Any) -> _Done:
        return _Done()

    def objects(self, found: list[Any], own: Any, *_: Any, **__: Any) -> None:
        found[:] = [own] * len(found)

    def _fill(self, out: Tensor, source: Tensor | None) -> None:
        key = (out.data_ptr(), out.numel())
        if self._span is None and key in self._filled:
            return
        self._filled.add(key)
        with no_span("") if self._span is None else self._span("silent_fill"):
            _fill(out, source)


@torch.no_grad()
def _fill(out: Tensor, source: Tensor | None) -> None:
    """`source` repeated or cut to the size of `out`; without it noise."""
    flat = out.detach().view(-1)
    if source is None:
        if out.is_floating_point():
            flat.normal_(std=0.02)
        return
    given = source.detach().reshape(-1)
    first = flat.data_ptr() - given.data_ptr()
    if 0 <= first < given.nbytes or 0 <= -first < flat.nbytes:
        return  # in place: it holds values already
    size = min(flat.numel(), given.numel())
    for start in range(0, flat.numel(), max(size, 1)):
        part = flat[start : start + size]
        part.copy_(given[: part.numel()])


@contextmanager
def silenced(span: Span | None = None) -> Iterator[None]:
    """Nothing that this process asks of torch.distributed inside moves a byte.

    span  outputs are filled at every call, in a span `silent_fill`
    """
    silence = _Silence(span)
    stand_ins: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("all_reduce", "reduce", "barrier"), silence.in_place),
        **dict.fromkeys(
            (
                *("all_gather_into_tensor", "all_gather_single"),
                *("reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"),
            ),
            silence.into,
        ),
        **dict.fromkeys(("isend", "send"), silence.send),
        **dict.fromkeys(("irecv", "recv", "broadcast"), silence.receive),
        "all_gather_object": silence.objects,
    }
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (dist, name, stand_in) for name, stand_in in stand_ins.items() if hasattr(dist, name)
    ]
    places += [(collectives, name, silence.into) for name in ("_gather_single", "_scatter_single")]
    originals = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, stand_in in places:
            setattr(module, name, stand_in)
        yield
    finally:
        for (module, name, _), original in zip(places, originals, strict=True):
            setattr(module, name, original)
