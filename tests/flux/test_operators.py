"""The operators on gloo ranks: values for all layouts and shares, refusals, what runs where."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import AllGatherGemm, GemmAllReduce, GemmReduceScatter, deadline
from megascale.flux.compat import AGKernel
from megascale.flux.deadline import Deadline
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks

ROWS = (1, 2, 3, 7, 8, 13)  # of all ranks: fewer than ranks, and shares that differ
IN, OUT = 6, 5
EXACT = 1e-13  # fp64: sums differ in order alone


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool(torch.allclose(found, wanted, rtol=0, atol=EXACT))


def _as(layout: str, weight_NK: Tensor) -> Tensor:
    return weight_NK if layout == "NK" else weight_NK.t().contiguous()


# ---------------------------------------------------------------- values


class Partial(NamedTuple):
    """What each rank holds of a product whose K is cut, and the sum."""

    x_TK: Tensor
    weight: Tensor
    y_TN: Tensor

    @classmethod
    def of(cls, m: int, layout: str, rank: int, world_size: int, seed: int = 0) -> Partial:
        k = IN + seed // 50  # a second product has another reduction
        xs = [_random(seed + 10 + r, m, k) for r in range(world_size)]
        weights = [_random(seed + 20 + r, OUT, k) for r in range(world_size)]
        y_TN = sum((x @ w.t() for x, w in zip(xs, weights, strict=True)), torch.zeros(()))
        return cls(xs[rank], _as(layout, weights[rank]), y_TN)


def _gathers(rank: int, world_size: int) -> list[str]:
    """The cases whose values are wrong."""
    operator = AllGatherGemm(dist.group.WORLD)
    wrong = []
    for m, layout, with_bias in itertools.product(ROWS, ("NK", "KN"), (False, True)):
        first, end = shard_rows(m, world_size, rank)
        x_TK = _random(1, m, IN)
        weights = [_as(layout, _random(2 + rank, n, IN)) for n in (OUT, OUT + 2)]
        biases = [_random(5 + rank, OUT), None] if with_bias else None
        wanted = [x_TK @ (w.t() if layout == "NK" else w) for w in weights]
        if biases and biases[0] is not None:
            wanted[0] = wanted[0] + biases[0]
        own: dict[str, Any] = {"weight_layout": layout, "num_rows": m}
        several, gathered = operator(x_TK[first:end], weights, biases, return_gathered=True, **own)
        one = operator(x_TK[first:end], weights[0], biases[0] if biases else None, **own)
        right = [_close(a, b) for a, b in zip([*several, one], [*wanted, wanted[0]], strict=True)]
        if not all(right) or not torch.equal(gathered, x_TK):
            wrong.append(f"{m} {layout} {with_bias} {right}")
    return wrong


def _reduces(rank: int, world_size: int) -> list[str]:
    scatter, reduce = GemmReduceScatter(dist.group.WORLD), GemmAllReduce(dist.group.WORLD)
    wrong = []
    for m, layout, with_bias in itertools.product(ROWS, ("NK", "KN"), (False, True)):
        case = Partial.of(m, layout, rank, world_size)
        bias = _random(5, OUT) if with_bias else None
        wanted = case.y_TN if bias is None else case.y_TN + bias
        first, end = shard_rows(m, world_size, rank)
        arguments = (case.x_TK, case.weight, bias)
        right = [
            _close(scatter(*arguments, weight_layout=layout), wanted[first:end]),
            _close(reduce(*arguments, weight_layout=layout), wanted),
            _close(
                scatter.start(case.x_TK, case.weight, weight_layout=layout)(),
                case.y_TN[first:end],
            ),
        ]
        if not all(right):
            wrong.append(f"{m} {layout} {with_bias} {right}")
    return wrong


def _pairs(rank: int, world_size: int) -> list[str]:
    scatter = GemmReduceScatter(dist.group.WORLD)
    wrong = []
    for m, layout, with_bias in itertools.product(ROWS, ("NK", "KN"), (False, True)):
        one, other = (Partial.of(m, layout, rank, world_size, seed) for seed in (0, 100))
        bias = _random(5, OUT) if with_bias else None
        wanted = one.y_TN + other.y_TN + (0.0 if bias is None else bias)
        found = scatter.pair(
            one.x_TK, one.weight, other.x_TK, other.weight, bias, weight_layout=layout
        )
        if not _close(found, wanted[slice(*shard_rows(m, world_size, rank))]):
            wrong.append(f"{m} {layout} {with_bias}")
    return wrong


def _gathers_alone(rank: int, world_size: int) -> list[int]:
    gather = AllGatherGemm(dist.group.WORLD)
    shares = {m: _random(1, m, IN)[slice(*shard_rows(m, world_size, rank))] for m in ROWS}
    started = {m: gather.start_all_gather(share, m) for m, share in shares.items()}
    return [m for m, wait in started.items() if not torch.equal(wait(), _random(1, m, IN))]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("check", [_gathers, _reduces, _pairs, _gathers_alone])
def test_values(check: Callable[..., list[Any]], world_size: int) -> None:
    assert run_ranks(check, world_size) == [[]] * world_size


@pytest.mark.parametrize("mode", ["auto", "fused", "chunked", "reference"])
def test_one_rank_is_a_plain_gemm_in_every_mode(mode: Any) -> None:
    x, weight, bias = _random(1, 3, IN), _random(2, OUT, IN), _random(3, OUT)
    wanted = x @ weight.t() + bias
    y, gathered = AllGatherGemm(None, mode=mode)(x, weight, bias, return_gathered=True)
    assert _close(y, wanted)
    assert gathered is x
    assert _close(GemmReduceScatter(None, mode=mode)(x, weight, bias), wanted)
    transposed = weight.t().contiguous()
    assert _close(GemmAllReduce(None)(x, transposed, bias, weight_layout="KN"), wanted)
    both = GemmReduceScatter(None, mode=mode).pair(x, weight, x, weight, bias)
    assert _close(both, 2 * wanted - bias)
    assert AllGatherGemm(None).start_all_gather(x)() is x


def _no_rows(rank: int, world_size: int) -> list[tuple[int, ...]]:
    none, weight = torch.empty(0, IN), torch.empty(OUT, IN)
    gathered = AllGatherGemm(dist.group.WORLD)(none, weight, num_rows=0)
    scattered = GemmReduceScatter(dist.group.WORLD)(none, weight)
    with pytest.raises(FluxError, match="x has no rows on this rank; give num_rows"):
        AllGatherGemm(dist.group.WORLD)(none, weight)
    return [tuple(gathered.shape), tuple(scattered.shape)]


def test_no_rows_at_all_are_no_call() -> None:
    assert run_ranks(_no_rows, 2) == [[(0, OUT), (0, OUT)]] * 2


# ---------------------------------------------------------------- refusals


X, WEIGHT = torch.zeros(4, IN), torch.zeros(OUT, IN)
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "dtype": ((X, WEIGHT.double()), {}, "weight is torch.float64 and x is torch.float32"),
    "bias dtype": ((X, WEIGHT, torch.zeros(OUT).double()), {}, "bias is torch.float64 and x is"),
    "layout": ((X, WEIGHT), {"weight_layout": "KM"}, "weight_layout is 'KM'; legal are"),
    "other layout": ((X, WEIGHT), {"weight_layout": "KN"}, r"it must be \[6, N\]"),
    "shape": ((X, WEIGHT[:, 1:]), {}, r"weight is \[5, 5\] and x has 6 columns"),
    "dimensions": ((X[0], WEIGHT), {}, r"x is \[6\]; it must have two dimensions"),
    "no tensor": (([[1.0]], WEIGHT), {}, r"x is \[\[1.0\]\]; it must be a tensor"),
    "no weight": ((X, None), {}, "weight is None; it must be a tensor"),
    "a number": ((X, 3), {}, "weight is 3; it must be a tensor"),
    "bias number": ((X, WEIGHT, 3), {}, "bias is 3; "),
    "layouts": ((X, WEIGHT), {"weight_layout": ["NK"]}, r"weight_layout is \['NK'\]; legal are"),
    "bias shape": ((X, WEIGHT, torch.zeros(IN)), {}, r"bias is \[6\]; it must be \[5\]"),
    "device": ((X.to("meta"), WEIGHT), {}, "weight is on cpu and x on meta"),
    "device of all": ((X.to("meta"), WEIGHT.to("meta")), {}, "backend of the group moves tensors"),
    "gradient": ((X, WEIGHT.clone().requires_grad_()), {}, "an argument requires a gradient"),
}
REFUSED_GATHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "text of rows": ((X, WEIGHT), {"num_rows": "8"}, "num_rows is '8'; it must be an integer"),
    "parts of rows": ((X, WEIGHT), {"num_rows": 8.0}, "num_rows is 8.0; it must be an integer"),
    "rows": ((X, WEIGHT), {"num_rows": 7}, r"x has 4 rows on rank 1 .* must hold rows 4 to 7"),
    "no weights": ((X, []), {}, "weight is an empty sequence"),
    "second weight": ((X, [WEIGHT, WEIGHT[:, 1:]]), {}, r"weight\[1\] is \[5, 5\]"),
    "biases": ((X, [WEIGHT, WEIGHT], [None]), {}, "there are 2 weights and 1 biases"),
    "one bias": ((X, [WEIGHT, WEIGHT], torch.zeros(OUT)), {}, "bias is one tensor for 2 weight"),
    "two biases": ((X, WEIGHT, [None]), {}, "bias is a sequence for 1 weight"),
}


def _refused(rank: int, world_size: int) -> list[str]:
    """Rank 1 alone is given something wrong, and says so without waiting for rank 0."""
    if rank == 0:
        return []
    silent = []
    operators = [t(dist.group.WORLD) for t in (AllGatherGemm, GemmReduceScatter, GemmAllReduce)]
    for operator in operators:
        cases = REFUSED | (REFUSED_GATHERS if operator is operators[0] else {})
        for name, (arguments, options, message) in cases.items():
            try:
                with pytest.raises(FluxError, match=message):
                    operator(*arguments, **options)
            except BaseException as error:  # noqa: BLE001 - all cases are looked at
                silent.append(f"{operator} {name}: {error}")
    pair = GemmReduceScatter(dist.group.WORLD).pair
    for second, message in (
        ((X[1:], WEIGHT), r"the products are \[4, 5\] and \[3, 5\]; to be summed they must be"),
        ((X, WEIGHT[1:]), r"the products are \[4, 5\] and \[4, 4\]"),
        ((X, WEIGHT.double()), "weight_b is torch.float64 and b is torch.float32"),
        ((X.double(), WEIGHT.double()), "b is torch.float64 and a is torch.float32"),
        ((X.to("meta"), WEIGHT.to("meta")), "b is on meta"),
        ((X, None), "weight_b is None; it must be a tensor"),
    ):
        with pytest.raises(FluxError, match=message):
            pair(X, WEIGHT, *second)
    return silent + _refused_starts()


def _refused_starts() -> list[str]:
    """Of rank 1 of two: what begins a transfer refuses what a call does."""
    gather, scatter = AllGatherGemm(dist.group.WORLD), GemmReduceScatter(dist.group.WORLD)
    asks, wrong = X.clone().requires_grad_(), []
    for name, start, message in (
        ("few", lambda: gather.start_all_gather(X, 5), "rank 1 must hold rows 3 to 5"),
        ("many", lambda: gather.start_all_gather(X, 20), "rank 1 must hold rows 10 to 20"),
        ("text", lambda: gather.start_all_gather(X, cast(Any, "8")), "num_rows is '8'"),
        ("row", lambda: gather.start_all_gather(X[0]), r"x is \[6\]; it must have two dim"),
        ("none", lambda: gather.start_all_gather(cast(Any, None)), "x is None; it must be a te"),
        ("no rows", lambda: gather.start_all_gather(X[:0]), "give num_rows, the rows of all"),
        ("meta", lambda: gather.start_all_gather(X.to("meta")), "moves tensors of cpu"),
        ("gradient", lambda: gather.start_all_gather(asks), "requires a gradient"),
        ("gradient of x", lambda: scatter.start(asks, WEIGHT), "requires a gradient"),
    ):
        try:
            with pytest.raises(FluxError, match=message):
                start()
        except BaseException as error:  # noqa: BLE001 - all cases are looked at
            wrong.append(f"{name}: {error}")
    return wrong


def test_one_rank_refuses_two_products_that_cannot_be_summed() -> None:
    pair = GemmReduceScatter(None).pair
    for second, message in (
        ((X.double(), WEIGHT.double()), "b is torch.float64 and a is torch.float32"),
        ((X.to("meta"), WEIGHT.to("meta")), "b is on meta and a on cpu"),
        ((X, WEIGHT.double()), "weight_b is torch.float64 and b is torch.float32"),
        ((X[1:], WEIGHT), r"the products are \[4, 5\] and \[3, 5\]"),
    ):
        with pytest.raises(FluxError, match=message):
            pair(X, WEIGHT, *second)
    with pytest.raises(FluxError, match="x has 4 rows on rank 0 of 1 and num_rows is 5"):
        AllGatherGemm(None).start_all_gather(X, 5)


def test_wrong_arguments_are_refused_before_anything_is_launched() -> None:
    assert run_ranks(_refused, 2)[1] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, "mode is 'fast'; legal are auto, fused, chunked, reference"),
        ({"tune": "later"}, "tune is 'later'; legal are cache, now"),
        ({"tune": "now", "mode": "fused"}, 'it goes with mode "auto"'),
        ({"tune": "now", "reserve_sms": 4}, "spin=True and reserve_sms=0, .* reserve_sms=4"),
        ({"mode": "fused", "spin": False}, "spin=False forbids it"),
        ({"reserve_sms": -1}, "reserve_sms is -1; it must be an integer, 0 or more"),
        ({"reserve_sms": "a"}, "reserve_sms is 'a'; it must be an integer, 0 or more"),
        ({"reserve_sms": 1.5}, "reserve_sms is 1.5; it must be an integer, 0 or more"),
        ({"deadline_s": 0.0}, "deadline_s is 0.0; it must be a number of seconds"),
        ({"deadline_s": "1"}, "deadline_s is '1'; it must be a number of seconds"),
        ({"deadline_s": float("nan")}, "deadline_s is nan; it must be a number of seconds"),
        ({"deadline_s": float("inf")}, "deadline_s is inf; it must be a number of seconds"),
        ({"cache": 5}, "cache is 5; it must be the path of a file, or None"),
        ({"spin": None}, "spin is None; legal are True and False"),
    ],
)
def test_illegal_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FluxError, match=message):
        GemmReduceScatter(None, **settings)


def test_what_is_no_group_is_refused() -> None:
    not_a_member: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(FluxError, match=r"group is -100; .* a process that is no member"):
        AllGatherGemm(not_a_member)

    class Mesh:
        def get_group(self) -> None: ...

    mesh: Any = Mesh()
    with pytest.raises(FluxError, match=r"of a DeviceMesh pass mesh\.get_group"):
        AllGatherGemm(mesh)


# ---------------------------------------------------------------- forms


def _forms(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What was logged, and what explicit modes raise."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megascale.flux").addHandler(handler)
    logging.getLogger("megascale.flux").setLevel(logging.INFO)
    for _ in range(2):
        AllGatherGemm(dist.group.WORLD)(X, WEIGHT)
        GemmAllReduce(dist.group.WORLD)(X, WEIGHT)
    raised = []
    for mode in ("fused", "chunked"):
        with pytest.raises(FluxError) as caught:
            GemmReduceScatter(dist.group.WORLD, mode=mode)(X, WEIGHT)
        raised.append(str(caught.value))
    return lines, raised


def test_on_cpu_auto_takes_the_reference_and_says_so_once_and_others_raise() -> None:
    (lines, raised), (quiet, also) = run_ranks(_forms, 2)
    why = "this rank computes on cpu; the kernels need CUDA devices"
    assert lines == [f"flux operators take the reference form: {why}"]
    assert quiet == []
    assert raised == also
    assert raised == [
        f'mode is "{mode}", and {why}; use mode "auto", which takes the reference where it must, '
        'or "reference"'
        for mode in ("fused", "chunked")
    ]


# ---------------------------------------------------------------- debug mode


def _missing(rank: int, world_size: int) -> str:
    operator = GemmReduceScatter(dist.group.WORLD, deadline_s=1.0)
    operator(X, WEIGHT)
    if rank == 1:
        store = cast(Any, dist.group.WORLD).get_group_store()
        while not all(store.get(f"flux/2/{peer}").startswith(b"gone") for peer in (0, 2)):
            time.sleep(0.05)
    with pytest.raises(FluxError) as caught:
        operator(X, WEIGHT)
    return str(caught.value)


def test_with_a_deadline_a_rank_that_does_not_call_is_named_and_hears_it_when_it_comes() -> None:
    first, late, third = run_ranks(_missing, 3)
    for rank, message in ((0, first), (2, third)):
        assert message.startswith("gemm_rs: of 3 ranks [1] did not call within 1.0 s")
        assert f"flux call 2 of rank {rank}" in message
    assert "rank 0: gone, after 1.0 s without ranks [1]; rank 1: gemm_rs m=4" in late


def test_calls_of_a_group_that_is_made_anew_are_counted_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name is that of the group before; peers may be processes that have counted none."""
    monkeypatch.setattr(deadline, "_calls", {})
    monkeypatch.setattr(dist, "get_rank", lambda _group: 0)
    before, anew = (
        Deadline(cast(Any, SimpleNamespace(group_name="0", size=lambda: 2)), 1.0) for _ in range(2)
    )
    assert [before._next() for _ in range(3)] == [1, 2, 3]
    assert [anew._next() for _ in range(2)] == [1, 2]


def _differing(rank: int, world_size: int) -> str:
    operator = GemmReduceScatter(dist.group.WORLD, deadline_s=20.0)
    for _ in range(3):
        operator(X, WEIGHT)
    with pytest.raises(FluxError) as caught:
        operator(X, torch.zeros(OUT + rank, IN))
    return str(caught.value)


def test_with_a_deadline_calls_that_differ_are_named() -> None:
    for message in run_ranks(_differing, 2):
        assert message.startswith("flux call 4 differs between ranks: rank 0: gemm_rs m=4 n=5 ")
        assert "; rank 1: gemm_rs m=4 n=6 k=6 torch.float32 NK mode=auto tune=cache" in message


def _settings_that_differ(rank: int, world_size: int) -> list[str]:
    raised = []
    settings: list[list[dict[str, Any]]] = [[{}, {"mode": "reference"}], [{}, {"spin": False}]]
    for each in settings:
        operator = GemmReduceScatter(dist.group.WORLD, deadline_s=20.0, **each[rank])
        with pytest.raises(FluxError) as caught:
            operator(X, WEIGHT)
        raised.append(str(caught.value))
    operator = GemmReduceScatter(dist.group.WORLD, deadline_s=20.0)
    square = torch.zeros(IN, IN)
    for x, layout in ((X, "NK" if rank else "KN"), (X[:, : IN - rank], "NK")):
        with pytest.raises(FluxError) as caught:
            operator(x, square if x is X else square[:, : x.shape[1]], weight_layout=layout)
        raised.append(str(caught.value))
    with pytest.raises(FluxError) as caught:
        AllGatherGemm(dist.group.WORLD, deadline_s=20.0).start_all_gather(X[:, : IN - rank])
    return [*raised, str(caught.value)]


@pytest.mark.full
def test_with_a_deadline_settings_layouts_and_widths_that_differ_are_named() -> None:
    first, second = run_ranks(_settings_that_differ, 2)
    assert first == second
    for message, (one, other) in zip(
        first,
        [
            ("mode=auto", "mode=reference"),
            ("spin=True", "spin=False"),
            (" KN ", " NK "),
            ("k=6", "k=5"),
            ("all_gather m=8 k=6", "all_gather m=8 k=5"),
        ],
        strict=True,
    ):
        on_0, on_1 = message.split("; rank 1: ")
        assert one in on_0
        assert other in on_1


def _refusing(rank: int, world_size: int) -> list[str]:
    """Rank 1 refuses each call in another place; then both make one that is right."""
    settings: dict[str, Any] = {"deadline_s": 20.0}
    gather = AllGatherGemm(dist.group.WORLD, **settings)
    scatter = GemmReduceScatter(dist.group.WORLD, **settings)
    compat = AGKernel(cast(Any, dist.group.WORLD), 1, 8, OUT, IN, torch.float32, **settings)
    asks, raised = WEIGHT.clone().requires_grad_(), []
    for right, wrong in (
        (lambda: scatter(X, WEIGHT), lambda: scatter(X, WEIGHT[:, 1:])),
        (lambda: scatter(X, WEIGHT), lambda: scatter(X, asks)),
        (lambda: gather(X, WEIGHT), lambda: gather(X, cast(Any, None))),
        (lambda: gather(X, WEIGHT), lambda: gather(X, WEIGHT, num_rows=7)),
        (partial(gather.start_all_gather, X), partial(gather.start_all_gather, X, 5)),
        (lambda: compat.forward(X, WEIGHT), lambda: compat.forward(cast(Any, None), WEIGHT)),
    ):
        with pytest.raises(FluxError) as caught:
            (right if rank != 1 else wrong)()
        raised.append(str(caught.value))
    scatter(X, WEIGHT)
    assert torch.equal(gather.start_all_gather(X)(), torch.cat([X, X]))
    return raised


@pytest.mark.full
def test_with_a_deadline_a_refusal_is_heard_and_the_next_call_is_right() -> None:
    heard, said = run_ranks(_refusing, 2)
    numbers = enumerate(zip(heard, said, strict=True), 1)
    for number, (there, here) in numbers:
        assert f"flux call {number} was not made; rank 1 refused it: {here}" in there


def _gathers_without_a_peer(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(FluxError) as caught:
        AllGatherGemm(dist.group.WORLD, deadline_s=0.5).start_all_gather(X)
    return str(caught.value)


@pytest.mark.full
def test_with_a_deadline_a_gather_that_a_peer_never_begins_names_it() -> None:
    message, _ = run_ranks(_gathers_without_a_peer, 2)
    assert message.startswith("all_gather: of 2 ranks [1] did not call within 0.5 s")


def test_the_end_of_a_started_gather_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one of two ranks, whose peer is there for the roll call alone."""
    gather, calls = AllGatherGemm(None), []
    deadline = Deadline.__new__(Deadline)
    vars(deadline).update(_deadline_s=2.5, _rank=0, _world_size=2)
    monkeypatch.setattr(deadline, "roll_call", lambda op, describe: calls.append((op, describe())))
    checks = SimpleNamespace(rows=lambda *_: 8, described_rows=lambda *_: "it")
    vars(gather).update(_deadline=deadline, _selection=SimpleNamespace(checks=checks))

    def trapped() -> Tensor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    report = torch.tensor([1, 1, 3, 0, 0, 0, 0, 0])
    monkeypatch.setattr(gather, "_start_all_gather", lambda *_: (trapped, report))
    wait = gather.start_all_gather(X)
    assert calls == [("all_gather", "it")]
    with pytest.raises(FluxError, match=r"all_gather: rank 0 waited 2\.5 s for the flag of tile 3"):
        wait()


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ([1, 2, 17, 0, 0, 0, 0, 0], "for the flag of tile 17 from rank 2; see its log. The CUDA"),
        ([1, 1, -1, 0, 0, 0, 0, 0], "for rank 1 in the barrier that begins a call; see its log"),
    ],
)
def test_a_trap_says_which_rank_and_tile_it_waited_for(report: list[int], said: str) -> None:
    group: Any = SimpleNamespace(group_name="three", size=lambda: 3)
    deadline = Deadline.__new__(Deadline)
    vars(deadline).update(_group=group, _deadline_s=2.5, _rank=0, _world_size=3)
    with (
        pytest.raises(FluxError, match=f"gemm_rs: rank 0 waited 2.5 s {said}"),
        deadline.watch("gemm_rs", torch.tensor(report)),
    ):
        raise RuntimeError("CUDA error: unspecified launch failure")
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        deadline.watch("gemm_rs", torch.zeros(8, dtype=torch.int64)),
    ):
        raise RuntimeError("out of memory")  # nothing was reported: not ours to explain
