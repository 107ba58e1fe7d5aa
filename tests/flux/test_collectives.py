"""Gather and reduce-scatter of rows, and the reference operators made of them."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import (
    TensorOps,
    all_gather,
    all_gather_gemm,
    collectives,
    column_parallel_linear,
    gemm_reduce_scatter,
    reduce_scatter,
    row_parallel_linear,
    row_parallel_pair,
)
from megascale.flux.collectives import rank_slice, start_all_gather, start_reduce_scatter
from tests.distributed import run_ranks

TOKENS, IN, OUT = 8, 12, 4  # 4 ranks divide all


def _whole(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _run(rank: int, world_size: int) -> dict[str, NDArray[np.float64]]:
    group = dist.group.WORLD
    rows = rank_slice(TOKENS, group)
    own, partial = _whole(0, TOKENS, IN)[rows], _whole(1 + rank, TOKENS, IN)
    x_TI, weight_OI, bias_O = _whole(7, TOKENS, IN), _whole(8, OUT, IN), _whole(9, OUT)
    y_To, gathered = all_gather_gemm(
        x_TI[rows], weight_OI.chunk(world_size)[rank], bias_O.chunk(world_size)[rank], group
    )
    x_Ti, weight_Oi = (t.chunk(world_size, 1)[rank].contiguous() for t in (x_TI, weight_OI))
    first, second = start_all_gather(own, group), start_reduce_scatter(partial, group)
    found = {
        "rows": torch.arange(TOKENS)[rows].double(),
        "gathered": all_gather(own, group),
        "transposed": all_gather(own.t().contiguous().t(), group),  # rows that are not contiguous
        "vector": all_gather(own[:, 0], group),
        "scattered": reduce_scatter(partial, group),
        "scattered transposed": reduce_scatter(partial.t().contiguous().t(), group),
        "second": second.wait(),  # two in flight, waited for the other way round
        "first": first.wait(),
        "ag_gemm": y_To,
        "ag_gemm x": gathered,
        "gemm_rs": gemm_reduce_scatter(x_Ti, weight_Oi, group),
    }
    return {name: value.numpy() for name, value in found.items()}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_travel_in_rank_order(num_ranks: int) -> None:
    by_rank = run_ranks(_run, num_ranks)
    x_TD, summed = _whole(0, TOKENS, IN), sum(_whole(1 + r, TOKENS, IN) for r in range(num_ranks))
    x_TI, weight_OI, bias_O = _whole(7, TOKENS, IN), _whole(8, OUT, IN), _whole(9, OUT)
    for found in by_rank:
        for name in ("gathered", "transposed", "first"):
            np.testing.assert_array_equal(found[name], x_TD)
        np.testing.assert_array_equal(found["vector"], x_TD[:, 0])
        np.testing.assert_array_equal(found["ag_gemm x"], x_TI)

    def joined(name: str, axis: int = 0) -> NDArray[np.float64]:
        return np.concatenate([found[name] for found in by_rank], axis)

    np.testing.assert_array_equal(joined("rows"), np.arange(TOKENS))
    for name in ("scattered", "scattered transposed", "second"):
        np.testing.assert_allclose(joined(name), summed, rtol=0, atol=1e-14)
    product = x_TI @ weight_OI.t()
    np.testing.assert_allclose(joined("ag_gemm", axis=1), product + bias_O, rtol=0, atol=1e-13)
    np.testing.assert_allclose(joined("gemm_rs"), product, rtol=0, atol=1e-13)


def test_without_a_group_the_tensor_itself_comes_back() -> None:
    x_TD = _whole(0, TOKENS, IN)
    assert all_gather(x_TD, None) is x_TD
    assert reduce_scatter(x_TD, None) is x_TD
    assert rank_slice(TOKENS, None) == slice(0, TOKENS)
    weight_OI = _whole(1, OUT, IN)
    y_TO, gathered = all_gather_gemm(x_TD, weight_OI, None, None)
    assert gathered is x_TD
    assert torch.equal(y_TO, gemm_reduce_scatter(x_TD, weight_OI, None))


def _inputs_alive(rank: int, world_size: int) -> list[bool]:
    pending = start_reduce_scatter(torch.ones(world_size, 1), dist.group.WORLD)
    source = torch.ones(1, 1)
    kept, gathering = weakref.ref(source), start_all_gather(source, dist.group.WORLD)
    del source
    before = kept() is not None
    gathering.wait()
    pending.wait()
    deadline = time.monotonic() + 10  # a thread of gloo may hold a finished input for a moment
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return [before, kept() is not None, pending.wait().item() == world_size]


def test_a_pending_keeps_its_input_until_the_collective_has_read_it() -> None:
    assert run_ranks(_inputs_alive, 2) == [[True, False, True]] * 2


def _refused(rank: int, world_size: int) -> dict[str, str]:
    """What is said of wrong arguments; nothing may be exchanged, nor multiplied, before."""
    group = dist.group.WORLD
    ops = TensorOps.of(group)
    x, weight, bias = torch.ones(4, IN), torch.ones(OUT, IN), torch.ones(OUT)
    wrong: dict[str, Callable[[], Any]] = {
        "uneven": lambda: reduce_scatter(torch.ones(3, 2), group),
        "scalar": lambda: reduce_scatter(torch.tensor(1.0), group),
        "list": lambda: all_gather([1.0], group),  # type: ignore[arg-type]
        "group": lambda: all_gather(x, "tensor"),  # type: ignore[arg-type]
        "rs uneven": lambda: gemm_reduce_scatter(x[:3], weight, group),
        "rs K": lambda: gemm_reduce_scatter(x, weight[:, 1:], group),
        "rs alone": lambda: gemm_reduce_scatter(x, weight[:, 1:], None),
        "rs group": lambda: gemm_reduce_scatter(x, weight, 2),  # type: ignore[arg-type]
        "rs x": lambda: gemm_reduce_scatter(None, weight, group),  # type: ignore[arg-type]
        "ag K": lambda: all_gather_gemm(x, weight[:, 1:], None, group),
        "ag bias": lambda: all_gather_gemm(x, weight, bias[1:], group),
        "ag type": lambda: all_gather_gemm(x, weight.double(), None, group),
        "ag group": lambda: all_gather_gemm(x, weight, None, 2),  # type: ignore[arg-type]
        "column": lambda: column_parallel_linear(x, weight, None, None),  # type: ignore[arg-type]
        "column K": lambda: column_parallel_linear(x, weight[:, 1:], None, ops),
        "row": lambda: row_parallel_linear(x, weight, None, group),  # type: ignore[arg-type]
        "row K": lambda: row_parallel_linear(x, weight[:, 1:], None, ops),
        "pair": lambda: row_parallel_pair(x, weight, x, weight, None, None),  # type: ignore[arg-type]
    }
    for name in ("_gather_single", "_scatter_single"):
        vars(collectives)[name] = _never
    vars(torch.nn.functional)["linear"] = _never
    return {name: _error(call) for name, call in wrong.items()}


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it starts")


def _error(call: Callable[[], Any]) -> str:
    with pytest.raises(FluxError) as caught:
        call()
    return str(caught.value)


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    of_k = '; with weight_layout "NK" it must be [N, 12]'
    k = f"weight is [4, 11] and x has 12 columns{of_k}"
    wanted = {
        "uneven": "x is [3, 2], whose 3 rows 2 ranks do not divide; give a multiple of 2 rows",
        "scalar": "x has no dimension; it must be a tensor",
        "list": "x is of type list; it must be a tensor",
        "group": "group is of type str; it must be a process group",
        "rs uneven": "x is [3, 12], whose 3 rows 2 ranks do not divide",
        "rs K": k,
        "rs alone": k,
        "rs group": "group is of type int; it must be a process group",
        "rs x": "x is None; it must be a tensor",
        "ag K": k,
        "ag bias": "bias is [3]; it must be [4]",
        "ag type": "weight is torch.float64 and x is torch.float32",
        "ag group": "group is of type int; it must be a process group",
        "column": "ops is of type NoneType; it must be a TensorOps: TensorOps.of(group)",
        "column K": k,
        "row": "ops is of type ProcessGroup; it must be a TensorOps",
        "row K": k,
        "pair": "ops is of type NoneType; it must be a TensorOps",
    }
    for found in run_ranks(_refused, 2):
        assert found.keys() == wanted.keys()
        assert not {name: said for name, said in found.items() if not said.startswith(wanted[name])}


_PROGRAM = """
import gc, sys, weakref
import torch
import torch.distributed as dist
from megascale.flux import TensorOps, column_parallel_linear

def run():
    ops = TensorOps.of(dist.group.WORLD)
    weight = torch.nn.Parameter(torch.ones(8, 4))
    column_parallel_linear(torch.ones(2, 4), weight, None, ops).sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()

store = f"file://{sys.argv[1]}"
dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[2]), world_size=2)
group = weakref.ref(dist.group.WORLD)
run()
dist.destroy_process_group()
gc.collect()
assert group() is None, gc.get_referrers(group())
"""


def test_nothing_keeps_a_destroyed_group(tmp_path: Path) -> None:
    """A gloo group that is alive when the interpreter ends may abort the process."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(tmp_path / "store"), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [(process.communicate(timeout=100)[1], process.returncode) for process in ranks]
    assert all(code == 0 for _, code in ended), ended
