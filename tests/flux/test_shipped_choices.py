"""The choices that the package ships: every one is offered to every problem of its shape class."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.flux import choice
from megascale.flux.call import Bound
from megascale.flux.choice import SHIPPED
from megascale.flux.gemm_config import HOPPER
from megascale.flux.problem import Problem
from megascale.flux.tuning_cache import Choice, Key, TuningCache, m_class


def _rows_of(m: int) -> list[int]:
    """Some of the rows whose class is called `m`, the extremes among them."""
    found = {m, max(1, m // 2 + 1), max(1, m // 2 + m // 6), max(1, m - 1)}
    return sorted(rows for rows in found if m_class(rows) == m)


def _offered(problem: Problem, form: str) -> list[Any]:
    call: Any = SimpleNamespace(op=problem.op, run=None)
    arena: Any = SimpleNamespace(device=torch.device("cpu"))
    found = choice._candidates(form, problem, call, arena, view=False)
    return [candidate.plain_config for candidate, _ in found]


def test_every_choice_is_offered_in_its_whole_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "capability_of", lambda _: HOPPER)
    monkeypatch.setattr(Bound, "run", lambda *_: None)
    entries: list[tuple[Key, Choice]] = list(TuningCache.load(SHIPPED).entries())
    assert len(entries) > 100
    for key, chosen in entries:
        for rows in _rows_of(key.m_class):
            problem = replace(key.problem, m=rows)
            assert chosen.config in _offered(problem, chosen.form), (key, rows, chosen.config)
