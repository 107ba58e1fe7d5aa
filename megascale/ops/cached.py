"""Tensors that are made once for their arguments: rotary tables, masks, column states.

They are made outside inference mode, whatever the caller is in: a tensor born in it could not be
saved for a backward pass later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def cached(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep the last `maxsize` results of a function of hashable arguments; do not write to them."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        def make(*args: P.args, **kwargs: P.kwargs) -> R:
            with torch.inference_mode(False):
                return fn(*args, **kwargs)

        return cast(Callable[P, R], functools.wraps(fn)(functools.lru_cache(maxsize)(make)))

    return decorate
