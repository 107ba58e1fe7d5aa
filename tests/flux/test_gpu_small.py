"""A small case of every form with two virtual ranks: what compute-sanitizer follows in a minute.

compute-sanitizer --tool memcheck python -m pytest -m gpu tests/flux/test_gpu_small.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.flux.forms import missing
from tests.flux.gpu_cases import OPS, Case, inputs, run_form, wrong
from tests.flux.virtual_ranks import VirtualArena, flags_at_rest, on_all, virtual_arenas, warm_up

WORLD = 2
FORMS = ("plain", "chunked", "fused", "few_rows")
DEADLINE_S = 100  # a kernel under the sanitizer takes a hundred times as long

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in OPS for name in FORMS if name not in missing(op)]
)
def test_small(op: Any, name: str) -> None:
    case = Case(op, 130, 264, 136, bias=True)
    arenas = virtual_arenas(WORLD, 1 << 20, DEADLINE_S)
    given = [inputs(case, r, WORLD, arenas[0].device, 1) for r in range(WORLD)]

    def call(rank: int, arena: VirtualArena) -> list[Tensor]:
        return run_form(name, case, given[rank], arena)[0]

    warm_up(arenas, call)
    for _ in range(2):
        for rank, found in enumerate(on_all(arenas, call)):
            assert wrong(case, found, given[rank]) == "", rank
        assert flags_at_rest(arenas)
