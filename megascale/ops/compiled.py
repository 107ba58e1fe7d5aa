"""One rule for chains without a kernel of their own: torch.compile on CUDA, eager on CPU.

Eager CUDA runs one kernel, and one pass over memory, for each operation of a chain; compiled, the
chain is one pass forward and one backward. On CPU the models are small and the compiler's start-up
costs more than it saves. Compilation happens at the first call, so importing stays cheap.

Shapes are static. torch's default makes a function dynamic at the second shape that it sees, for
all shapes from then on, and index arithmetic with unknown sizes cost a factor of four in a chain
of a [T, V] tensor. So each shape has its own compiled form, and there are at most MOST_SHAPES of
them: a compilation takes seconds, and past torch's own limit (`recompile_limit`, 8) a function runs
eagerly for good without a word. Training has one shape, and evaluation one more; who has a shape
at every call (generation) does not gain from compiling and runs the rest eagerly, which is logged
once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from megascale.ops.mode import OperatorMode

P = ParamSpec("P")
R = TypeVar("R")

MOST_SHAPES = 6

logger = logging.getLogger(__name__)


def compiled_on_cuda(
    fn: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[OperatorMode, Tensor, P], R]:
    """`fn` with the mode in front of its arguments: "fused" on CUDA runs a compiled form."""
    compiled: Callable[Concatenate[Tensor, P], R] | None = None
    shapes: set[Hashable] = set()

    @functools.wraps(fn)
    def dispatch(mode: OperatorMode, first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if mode == "plain" or not first.is_cuda:
            return fn(first, *args, **kwargs)
        key = _static(first), *map(_static, args), *map(_static, kwargs.values())
        if key not in shapes:
            if len(shapes) >= MOST_SHAPES:
                _say_once(fn.__qualname__)
                return fn(first, *args, **kwargs)
            shapes.add(key)
        if compiled is None:
            compiled = torch.compile(fn, dynamic=False)
        return compiled(first, *args, **kwargs)

    return dispatch


def _static(value: Any) -> Hashable:
    """What a compiled form depends on. Strides are left out: they follow from the shapes here."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple):
        return tuple(map(_static, value))
    hashable: Hashable = value
    return hashable


@functools.cache
def _say_once(name: str) -> None:
    logger.info("%s: more than %d shapes; further ones run uncompiled", name, MOST_SHAPES)
