"""One rule for fusion: element-wise chains run through torch.compile on CUDA, eagerly on CPU.

Eager CUDA runs one kernel, and one pass over memory, for each operation of a chain; compiled, the
chain is one pass forward and one backward. On CPU the models are small and the compiler's start-up
costs more than it saves. Compilation happens at the first call, so importing stays cheap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compiled_on_cuda(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap `fn`, whose first argument is a tensor, so that CUDA calls run a compiled form."""
    compiled: Callable[P, R] | None = None

    @functools.wraps(fn)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first = args[0]
        assert isinstance(first, torch.Tensor), type(first)
        if not first.is_cuda:
            return fn(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(fn)
        return compiled(*args, **kwargs)

    return dispatch
