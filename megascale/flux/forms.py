"""The forms of each operator by name, imported when they are asked for.

A table and nothing else, so that the tuner, the operators and the bench offer the same forms, and a
process without triton can name all of them. Which one runs is the tuner's affair (`tuner.py`).

| name | what |
|---|---|
| nccl | the backend's collective and cuBLAS, one after the other: exists everywhere |
| symm_mem | torch's fused operators over symmetric memory |
| one_shot, two_shot | cuBLAS and torch's all-reduces over symmetric memory |
| plain | cuBLAS and our collective over symmetric memory |
| chunked | cuBLAS on chunks, transfers by copy engines on a second stream |
| fused | one kernel |
| few_rows | one kernel for m up to a few hundred: latency instead of bandwidth |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megascale.errors import FluxError

Form = Callable[..., Any]

_AG, _RS, _AR = "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"

FORMS: dict[str, dict[str, tuple[str, str]]] = {
    "ag_gemm": {
        "nccl": (f"{_AG}.nccl", _AG),
        "symm_mem": ("torch_symm", _AG),
        "plain": (f"{_AG}.plain", _AG),
        "chunked": (f"{_AG}.chunked", _AG),
        "fused": (f"{_AG}.launch", _AG),
        "few_rows": (f"{_AG}.few_rows", _AG),
    },
    "gemm_rs": {
        "nccl": (f"{_RS}.nccl", _RS),
        "symm_mem": ("torch_symm", _RS),
        "plain": (f"{_RS}.plain", _RS),
        "chunked": (f"{_RS}.chunked", _RS),
        "fused": (f"{_RS}.launch", _RS),
        "few_rows": (f"{_RS}.few_rows", _RS),
    },
    "gemm_ar": {
        "nccl": (f"{_AR}.nccl", _AR),
        "one_shot": ("torch_symm", "one_shot"),
        "two_shot": ("torch_symm", "two_shot"),
        "plain": (f"{_AR}.plain", _AR),
        "chunked": (f"{_AR}.chunked", _AR),
        "fused": (f"{_AR}.launch", _AR),
        "few_rows": (f"{_AR}.few_rows", _AR),
    },
    "all_gather": {
        "nccl": ("nccl", "all_gather"),
        "plain": ("all_gather.launch", "all_gather"),
    },
    "reduce_scatter": {
        "nccl": ("nccl", "reduce_scatter"),
        "plain": ("reduce_scatter.launch", "reduce_scatter"),
    },
    "all_reduce": {
        "nccl": ("nccl", "all_reduce"),
        "one_shot": ("torch_symm", "one_shot_all_reduce"),
        "two_shot": ("torch_symm", "two_shot_all_reduce"),
        "plain": ("all_reduce.launch", "all_reduce"),
    },
}


def forms(op: str) -> dict[str, Form]:
    """The forms of `op` by name. A form's modules are imported at its first call.

    Raises FluxError for an operator that does not exist.
    """
    return {name: _lazy(*place) for name, place in _table(op).items()}


def missing(op: str) -> list[str]:
    """Names of forms whose module is not in this installation (a form without its kernel)."""
    return [n for n, (module, _) in _table(op).items() if not find_spec(f"megascale.flux.{module}")]


def _table(op: str) -> dict[str, tuple[str, str]]:
    if op not in FORMS:
        raise FluxError(f"op is {op!r}; the operators are {', '.join(FORMS)}")
    return FORMS[op]


@cache
def _load(module: str, name: str) -> Form:
    form: Form = getattr(import_module(f"megascale.flux.{module}"), name)
    return form


@cache
def _lazy(module: str, name: str) -> Form:
    def form(*args: Any, **kwargs: Any) -> Any:
        return _load(module, name)(*args, **kwargs)

    form.__qualname__ = form.__name__ = f"{module}.{name}"
    return form
