"""Wrong arguments of the operators over nodes are refused before anything is exchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.errors import FluxError
from megascale.flux.hierarchical import Nodes, all_gather_gemm, gemm_reduce_scatter

K, N = 6, 5
X, WEIGHT, BIAS = torch.ones(4, K), torch.ones(N, K), torch.ones(N)
NODES: Any = Nodes(
    SimpleNamespace(rank=1, world_size=2, device=torch.device("cpu")),
    SimpleNamespace(rank=lambda: 1, size=lambda: 2),  # type: ignore[arg-type]
)
NO_INTEGER = "; it must be an integer, "
CHUNKS = [
    ({"chunks": chunks}, f"chunks is {chunks!r}{NO_INTEGER}1 or more")
    for chunks in (0, -1, "2", 1.5, True, None)
]
BOTH: list[tuple[dict[str, Any], str]] = [
    *CHUNKS,
    ({"layout": "NM"}, "weight_layout is 'NM'; legal are"),
    ({"x": None}, "x is None; it must be a tensor"),
    ({"x": X[0]}, "x is [6]; it must have two dimensions"),
    ({"x": X.to("meta"), "weight": WEIGHT.to("meta"), "bias": None}, "x is on meta and the ranks"),
    ({"weight": WEIGHT[:, 1:]}, "weight is [5, 5] and x has 6 columns"),
    ({"weight": WEIGHT.double()}, "weight is torch.float64 and x is torch.float32"),
    ({"bias": BIAS[1:]}, "bias is [4]; it must be [5]"),
    ({"form": "chunked"}, "form is of type str; it must be a form of one node"),
]


@pytest.fixture(autouse=True)
def _nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("P2POp", "batch_isend_irecv", "new_group"):
        monkeypatch.setattr(dist, name, _never)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it starts")


def _gather(x: Any = X, weight: Any = WEIGHT, bias: Any = BIAS, **others: Any) -> Any:
    values = {"weights": [weight], "biases": [bias], "form": _never, "layout": "NK", **others}
    return all_gather_gemm(x, nodes=NODES, **values)


def _scatter(x: Any = X, weight: Any = WEIGHT, bias: Any = BIAS, **others: Any) -> Any:
    values = {"form": _never, "layout": "NK", **others}
    return gemm_reduce_scatter(x, weight, bias, NODES, **values)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        *BOTH,
        ({"num_rows": 100}, "x has 4 rows on rank 3 of 4 and num_rows is 100; rank 3 must hold"),
        ({"num_rows": -1}, f"num_rows is -1{NO_INTEGER}0 or more"),
        ({"num_rows": 16.0}, f"num_rows is 16.0{NO_INTEGER}0 or more"),
        ({"x": X[:0]}, "x has no rows on this rank; give num_rows"),
        ({"weights": WEIGHT}, "weights is of type Tensor; it must be a list"),
        ({"weights": []}, "weight is an empty sequence"),
        ({"biases": None}, "biases is of type NoneType; it must be a list"),
        ({"biases": []}, "there are 1 weights and 0 biases"),
        ({"gathered": 1}, "gathered is 1; legal are True and False"),
        ({"form_writes": "no"}, "form_writes is 'no'; legal are True and False"),
    ],
)
def test_a_wrong_gather_sends_nothing(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FluxError) as caught:
        _gather(**options)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(("options", "complaint"), BOTH)
def test_a_wrong_scatter_sends_nothing(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FluxError) as caught:
        _scatter(**options)
    assert str(caught.value).startswith(complaint)


def test_what_is_right_starts() -> None:
    for call in (_gather, _scatter):
        for chunks in (1, 3):
            with pytest.raises(AssertionError, match="it starts"):
                call(chunks=chunks)


class _Group(dist.ProcessGroup):
    def size(self) -> int:
        return 4


GROUP = _Group(0, 4)  # type: ignore[call-arg] # the stub knows only one of its constructors


@pytest.mark.parametrize(
    ("group", "ranks_per_node", "ranks_of", "complaint"),
    [
        (None, 2, _never, "group is of type NoneType; it must be a process group"),
        (GROUP, 0, _never, f"ranks_per_node is 0{NO_INTEGER}1 or more"),
        (GROUP, "2", _never, f"ranks_per_node is '2'{NO_INTEGER}1 or more"),
        (GROUP, 3, _never, "ranks_per_node is 3 and the group has 4 ranks; every node must"),
        (GROUP, 2, None, "ranks_of is of type NoneType; it must be a function"),
    ],
)
def test_what_cannot_be_cut_into_nodes_makes_no_group(
    group: Any, ranks_per_node: Any, ranks_of: Any, complaint: str
) -> None:
    with pytest.raises(FluxError) as caught:
        Nodes.of(group, ranks_per_node, ranks_of)
    assert str(caught.value).startswith(complaint)
