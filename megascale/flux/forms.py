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
| two_shot_view | the latter in place: the next call but one overwrites it; on request only |
| in_flight | one kernel, whose tiles are added up at their owner; on request only |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from megascale.errors import FluxError
from megascale.flux.problem import Problem

Form = Callable[..., Any]


class Place(NamedTuple):
    """Where a form is: module below `megascale.flux`, function, and the module of its `candidates`.

    by_device  `candidates` asks for the compute capability too
    most_rows  beyond which the form is not worth a compilation; 0 is no bound
    on_request  tried only where it is asked for by name: its sums are rounded more than others', or
                its result is overwritten by later calls
    views       takes `view`: then the result may be such memory, and is not copied out of it
    """

    module: str
    function: str
    configs: str = ""
    by_device: bool = False
    most_rows: int = 0
    on_request: bool = False
    views: bool = False


_FEW_ROWS = ("few_rows.config", True, 256)
_AG, _RS, _AR = "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"

FORMS: dict[str, dict[str, Place]] = {
    "ag_gemm": {
        "nccl": Place(f"{_AG}.nccl", _AG),
        "symm_mem": Place("torch_symm", _AG),
        "plain": Place(f"{_AG}.plain", _AG),
        "chunked": Place(f"{_AG}.chunked", _AG, f"{_AG}.chunked"),
        "fused": Place(f"{_AG}.launch", _AG, f"{_AG}.config", by_device=True),
        "few_rows": Place(f"{_AG}.few_rows", _AG, *_FEW_ROWS),
    },
    "gemm_rs": {
        "nccl": Place(f"{_RS}.nccl", _RS),
        "symm_mem": Place("torch_symm", _RS),
        "plain": Place(f"{_RS}.plain", _RS, "symmetric.config"),
        "chunked": Place(f"{_RS}.chunked", _RS, f"{_RS}.chunked"),
        "fused": Place(f"{_RS}.launch", _RS, f"{_RS}.config", by_device=True),
        "few_rows": Place(f"{_RS}.few_rows", _RS, *_FEW_ROWS),
        "in_flight": Place(
            f"{_RS}.in_flight.launch", _RS, f"{_RS}.in_flight.config", True, on_request=True
        ),
    },
    "gemm_ar": {
        "nccl": Place(f"{_AR}.nccl", _AR),
        "one_shot": Place("torch_symm", "one_shot"),
        "two_shot": Place("torch_symm", "two_shot"),
        "plain": Place(f"{_AR}.plain", _AR, "symmetric.config", views=True),
        "chunked": Place(f"{_AR}.chunked", _AR),
        "fused": Place(f"{_AR}.launch", _AR, f"{_RS}.config", by_device=True, views=True),
        "few_rows": Place(f"{_AR}.few_rows", _AR, *_FEW_ROWS),
        "two_shot_view": Place("torch_symm", "two_shot_view", on_request=True),
    },
    "all_gather": {
        "nccl": Place("nccl", "all_gather"),
        "plain": Place("symmetric.all_gather", "all_gather"),
    },
    "reduce_scatter": {
        "nccl": Place("nccl", "reduce_scatter"),
        "plain": Place("symmetric.reduce_scatter", "reduce_scatter"),
    },
    "all_reduce": {
        "nccl": Place("nccl", "all_reduce"),
        "one_shot": Place("torch_symm", "one_shot_all_reduce"),
        "two_shot": Place("torch_symm", "two_shot_all_reduce"),
        "plain": Place("symmetric.all_reduce", "all_reduce"),
    },
}


def forms(op: str) -> dict[str, Form]:
    """The forms of `op` by name. A form's modules are imported at its first call.

    Raises FluxError for an operator that does not exist.
    """
    return {name: _lazy(p.module, p.function) for name, p in _table(op).items()}


def configs(op: str, name: str, problem: Problem, capability: tuple[int, int]) -> list[Any]:
    """Configurations of a form worth timing, for its keyword `config`; the first is its default.

    [None] where a form has none: it is called without the keyword. Empty where the form is not for
    this problem.
    """
    place = _table(op)[name]
    if place.most_rows and problem.m > place.most_rows:
        return []
    if not place.configs:
        return [None]
    candidates = _load(place.configs, "candidates")
    found: list[Any] = candidates(problem, capability) if place.by_device else candidates(problem)
    return found


def missing(op: str) -> list[str]:
    """Names of forms whose module is not in this installation (a form without its kernel)."""
    return [name for name, place in _table(op).items() if not _exists(place.module)]


def views(op: str, name: str) -> bool:
    """Whether the form takes `view`."""
    return _table(op)[name].views


def on_request(op: str) -> list[str]:
    """Names of forms that are tried only where they are asked for."""
    return [name for name, place in _table(op).items() if place.on_request]


@cache
def _exists(module: str) -> bool:
    try:
        return find_spec(f"megascale.flux.{module}") is not None
    except ModuleNotFoundError:  # its package
        return False


def _table(op: str) -> dict[str, Place]:
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
