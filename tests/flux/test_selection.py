"""Which form is taken: by mode, by what was measured, by type. Stand-ins of forms are taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.config import ParallelismConfig
from megascale.errors import FluxError
from megascale.flux import (
    AllGatherGemm,
    GemmAllReduce,
    GemmReduceScatter,
    choice,
    local_checks,
    problem,
    selection,
)
from megascale.flux.call import Call
from megascale.flux.mode import FluxMode
from megascale.flux.problem import Problem
from megascale.flux.selection import Selection
from megascale.flux.settings import Settings
from megascale.flux.tuning_cache import Choice, Key, TuningCache
from tests.distributed import run_ranks

N, K = 8, 16
TWO = {"stages": 2}
SMALL, LARGE = 64, 4096  # rows: below and above what `few_rows` is for


@dataclass(frozen=True)
class Tiles:
    stages: int


class Machine:
    """Makes this process believe that its CPU runs kernels; forms answer with their name."""

    num_sms = 100

    def __init__(self, *absent: str) -> None:
        self.device = torch.device("cpu")
        self.reserved_sms, self.deadline_ns = 0, 0
        self.report = torch.zeros(8, dtype=torch.int64)
        self.calls: list[tuple[str, Any]] = []
        self.group = dist.group.WORLD
        here, there = vars(selection), vars(choice)
        here["why_not_fused"] = lambda _group, _device: None
        vars(local_checks)["check"] = self._check
        there["missing"] = lambda _op: list(absent)
        there["configs"] = lambda _op, name, *_: [Tiles(1), Tiles(2)] if name == "fused" else [None]
        here["forms"] = there["forms"] = lambda _op: {
            name: self._form(name)
            for name in ("nccl", "symm_mem", "plain", "chunked", "fused", "few_rows", "in_flight")
        }
        here["Arena"] = SimpleNamespace(of=lambda _group, _device: self)

    def _check(
        self, *arguments: Any, fused: bool = False, names: tuple[str, str]
    ) -> problem.Problem:
        if fused and arguments[1].dtype != torch.bfloat16:
            raise FluxError(f"x is {arguments[1].dtype}; kernels take bf16")
        return problem.check(*arguments, names=names)

    def reset(self) -> None:
        """Nothing is left: forms only answer."""

    def _form(self, name: str) -> Any:
        def form(x: Tensor, weight: Tensor, bias: Any, ranks: Any, **options: Any) -> Tensor:
            self.calls.append((name, options.get("config")))
            assert x.is_contiguous()
            return x.new_empty(x.shape[0] // 2, weight.shape[0])

        form.__name__ = name
        return form


def _taken(machine: Machine, m: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> str:
    operator = GemmReduceScatter(dist.group.WORLD, **settings)
    operator(torch.zeros(m, K, dtype=dtype), torch.zeros(N, K, dtype=dtype))
    name, config = machine.calls[-1]
    return name if config is None else f"{name} {config.stages}"


def _by_mode(rank: int, world_size: int) -> dict[str, list[str]]:
    machine = Machine()
    modes: list[dict[str, Any]] = [
        {"mode": "auto"},
        {"mode": "auto", "spin": False},
        {"mode": "auto", "reserve_sms": 8},
        {"mode": "fused"},
        {"mode": "chunked"},
        {"mode": "reference"},
    ]
    return {str(s): [_taken(machine, m, **s) for m in (SMALL, LARGE)] for s in modes}


def test_what_a_mode_takes_where_nothing_was_measured() -> None:
    for found in run_ranks(_by_mode, 2):
        assert list(found.values()) == [
            ["few_rows", "fused 1"],
            ["chunked", "chunked"],
            ["few_rows", "fused 1"],
            ["few_rows", "fused 1"],
            ["chunked", "chunked"],
            ["nccl", "nccl"],
        ]


def _absent_forms(rank: int, world_size: int) -> list[str]:
    machine = Machine("fused", "few_rows")
    found = [_taken(machine, LARGE)]
    with pytest.raises(FluxError) as caught:
        _taken(machine, LARGE, mode="fused")
    return [*found, str(caught.value)]


def test_forms_that_are_not_installed_are_not_taken() -> None:
    for taken, error in run_ranks(_absent_forms, 2):
        assert taken == "chunked"
        assert error.startswith('mode is "fused", and gemm_rs has none of its forms (few_rows, fu')


def _measured(rank: int, world_size: int, path: str) -> list[str]:
    """What rank 0 reads from a file decides on all."""
    machine = Machine()
    key = Key.of(problem.Problem("gemm_rs", LARGE, N, K, 2, torch.bfloat16, "NK"))
    if rank == 0:
        cache = TuningCache(path)
        ms = {"fused(stages=1)": 3.0, "fused(stages=2)": 2.0, "chunked": 5.0, "nccl": 4.0}
        cache.put(key, Choice("fused", {"stages": 2}, ms))
        cache.save()
    dist.barrier()
    file = path if rank == 0 else path + ".not-there"
    settings: list[dict[str, Any]] = [{}, {"spin": False}, {"mode": "fused"}, {"mode": "chunked"}]
    return [_taken(machine, LARGE, cache=file, **s) for s in settings]


def test_the_fastest_measured_form_that_is_allowed_is_taken_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(_measured, 2, str(tmp_path / "tuned.json"))
    assert found == [["fused 2", "nccl", "fused 2", "chunked"]] * 2


def _in_flight(rank: int, world_size: int, path: str) -> list[list[str]]:
    """What operators take that ask for the sum in flight, and that do not, from one file: of a
    class that was measured for one of them, for both, for neither."""
    machine = Machine()
    of_others = {"fused(stages=1)": 3.0, "fused(stages=2)": 2.0, "chunked": 5.0, "nccl": 4.0}
    classes = [LARGE, 2 * LARGE, 4 * LARGE, 8 * LARGE]
    if rank == 0:
        cache = TuningCache(path)
        measured: list[list[str]] = [[""], ["in_flight"], ["", "in_flight"], []]
        for m, keys in zip(classes, measured, strict=True):
            of_class = Problem("gemm_rs", m, N, K, 2, torch.bfloat16, "NK")
            for asked in keys:
                ms = {**of_others, "in_flight": 1.0} if asked else of_others
                choice = Choice("in_flight", None, ms) if asked else Choice("fused", TWO, ms)
                cache.put(Key.of(of_class, asked=asked), choice)
        cache.save()
    dist.barrier()
    settings: list[dict[str, Any]] = [
        {},
        {"in_flight": True},
        {"in_flight": True, "reserve_sms": 8},
        {"in_flight": True, "mode": "fused"},
    ]
    return [[_taken(machine, m, cache=path, **s) for m in classes] for s in settings]


def test_the_sum_in_flight_is_taken_only_where_it_is_asked_for(tmp_path: Path) -> None:
    for found in run_ranks(_in_flight, 2, str(tmp_path / "tuned.json")):
        assert found == [
            ["fused 2", "fused 1", "fused 2", "fused 1"],
            ["fused 2", "in_flight", "in_flight", "fused 1"],
            ["fused 2", "in_flight", "in_flight", "fused 1"],
            ["in_flight"] * 4,
        ]


def _in_flight_now(rank: int, world_size: int, path: str) -> list[list[str]]:
    """The forms that are tried by an operator that does not ask, and by one that does after it."""
    machine = Machine()
    tried = []
    asking: dict[str, Any] = {"in_flight": True}
    for settings in ({}, asking, {}, asking):
        machine.calls.clear()
        _taken(machine, LARGE, tune="now", cache=path, **settings)
        tried.append(sorted({name for name, _ in machine.calls}))
    return tried


@pytest.mark.full
def test_tune_now_tries_the_sum_in_flight_only_where_it_is_asked_for(tmp_path: Path) -> None:
    for first, asking, again, asking_again in run_ranks(
        _in_flight_now, 2, str(tmp_path / "t.json")
    ):
        assert "in_flight" not in first
        assert {*first, "in_flight"} == set(asking), "a class of its own, measured anew"
        assert len(again) == len(asking_again) == 1


def _views(rank: int, world_size: int) -> list[Any]:
    """Forms that are tried, and whether they were given `view`; then what is refused."""
    machine = Machine()
    given: dict[str, set[bool]] = {}

    def form(name: str) -> Any:
        def called(x: Tensor, weight: Tensor, *_: Any, view: bool = False, **_options: Any) -> Any:
            given.setdefault(name, set()).add(view)
            return x.new_empty(x.shape[0], weight.shape[0])

        return called

    names = ("nccl", "one_shot", "plain", "fused", "few_rows", "two_shot_view")
    vars(choice)["forms"] = lambda _op: {name: form(name) for name in names}
    machine.group = dist.group.WORLD
    found: list[Any] = []
    for view in (False, True):
        operator = GemmAllReduce(dist.group.WORLD, tune="now", view=view)
        operator(torch.zeros(LARGE, K).bfloat16(), torch.zeros(N, K).bfloat16())
        found.append({name: sorted(values) for name, values in given.items()})
        given.clear()
    return found


def test_results_stay_in_symmetric_memory_only_where_it_is_asked_for() -> None:
    for copied, viewed in run_ranks(_views, 2):
        assert copied.keys() == {"nccl", "one_shot", "plain", "fused", "few_rows"}
        assert all(values == [False] for values in copied.values())
        assert {name for name, values in viewed.items() if values == [True]} == {
            "plain",
            "fused",
        }
        assert viewed.keys() == {*copied, "two_shot_view"}
    with pytest.raises(FluxError, match="AllGatherGemm always gives tensors of its own"):
        AllGatherGemm(None, view=True)


def _measured_for_views(rank: int, world_size: int, path: str) -> list[list[str]]:
    """What an all-reduce takes of measured tiles, with the result in symmetric memory and without:
    of a class that was measured without alone, and of one whose form on request is the fastest."""
    machine = Machine()
    names = ("nccl", "plain", "fused", "chunked", "few_rows", "two_shot_view")
    vars(choice)["forms"] = lambda _op: {name: machine._form(name) for name in names}
    classes = [LARGE, 2 * LARGE]
    if rank == 0:
        cache = TuningCache(path)
        of_all = {"fused(stages=1)": 3.0, "fused(stages=2)": 2.0, "chunked": 5.0, "nccl": 4.0}
        of_views = {**of_all, "fused(stages=1)": 1.5, "two_shot_view": 1.0}
        for m in classes:
            of_class = Problem("gemm_ar", m, N, K, 2, torch.bfloat16, "NK")
            cache.put(Key.of(of_class), Choice("fused", TWO, of_all))
        cache.put(Key.of(of_class, asked="two_shot_view"), Choice("two_shot_view", None, of_views))
        cache.save()
    dist.barrier()
    settings: list[dict[str, Any]] = [{}, {"mode": "fused"}, {"spin": False}]
    found = []
    for options in (o | {"view": view} for o in settings for view in (False, True)):
        operator = GemmAllReduce(dist.group.WORLD, cache=path, **options)
        taken = []
        for m in classes:
            operator(torch.zeros(m, K).bfloat16(), torch.zeros(N, K).bfloat16())
            name, config = machine.calls[-1]
            taken.append(name if config is None else f"{name} {config.stages}")
        found.append(taken)
    return found


def test_a_class_of_a_form_on_request_is_read_where_it_may_be_taken(tmp_path: Path) -> None:
    for found in run_ranks(_measured_for_views, 2, str(tmp_path / "tuned.json")):
        assert found == [
            ["fused 2", "fused 2"],
            ["fused 2", "two_shot_view"],
            ["fused 2", "fused 2"],
            ["fused 2", "fused 2"],  # and not the tiles of the rule
            ["nccl", "nccl"],
            ["nccl", "nccl"],
        ]


def test_options_that_contradict_the_sum_in_flight_are_refused() -> None:
    for options in ({"mode": "chunked"}, {"mode": "reference"}, {"spin": False}):
        with pytest.raises(FluxError, match="in_flight asks for a kernel that waits for peers"):
            GemmReduceScatter(None, in_flight=True, **options)
    with pytest.raises(FluxError, match="in_flight is 1; legal are True and False"):
        Settings(in_flight=1)  # type: ignore[arg-type]
    for kind in (AllGatherGemm, GemmAllReduce):
        with pytest.raises(FluxError, match=f"{kind.__name__} has no such form"):
            kind(None, in_flight=True)
    assert Settings(in_flight=True).of_all_ranks != Settings().of_all_ranks


def _tuned_now(rank: int, world_size: int, path: str) -> list[Any]:
    Machine("symm_mem", "plain")
    operator = AllGatherGemm(dist.group.WORLD, tune="now", cache=path)
    x, weight = torch.zeros(LARGE // 2, K).bfloat16(), torch.zeros(N, K).bfloat16()
    there = vars(choice)
    calls: list[str] = []

    def form(name: str, repeats: int) -> Any:
        def run(x: Tensor, weights: Any, *_: Any, **__: Any) -> tuple[list[Tensor], None]:
            calls.append(name)
            for _repeat in range(repeats):
                x @ weights[0].t()
            return [torch.zeros(LARGE, N).bfloat16()], None

        return run

    there["configs"] = lambda *_: [None]
    there["forms"] = lambda _op: {
        name: form(name, 400 if name != "chunked" else 1)
        for name in ("nccl", "chunked", "fused", "few_rows", "symm_mem", "plain")
    }
    operator(x, weight)
    measured = len(calls)
    operator(x, weight)
    return [calls[-1], len(calls) - measured, sorted(set(calls))]


@pytest.mark.full
def test_tune_now_measures_once_what_is_installed(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    for taken, again, names in run_ranks(_tuned_now, 2, str(path)):
        assert (taken, again) == ("chunked", 1)
        assert names == ["chunked", "few_rows", "fused", "nccl"]
    ((key, stored),) = TuningCache.load(path).entries()
    assert (key.op, key.m_class, stored.form) == ("ag_gemm", LARGE, "chunked")


def _by_type(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    machine, lines = Machine(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megascale.flux").addHandler(handler)
    logging.getLogger("megascale.flux").setLevel(logging.INFO)
    taken = [_taken(machine, LARGE, torch.float32) for _ in range(2)]
    with pytest.raises(FluxError, match=r"x is torch\.float32; kernels take bf16"):
        _taken(machine, LARGE, torch.float32, mode="chunked")
    return taken, lines


def test_a_type_that_kernels_do_not_take_runs_as_the_reference() -> None:
    (taken, lines), (also, _) = run_ranks(_by_type, 2)
    assert taken == also == ["nccl", "nccl"]
    assert lines == [
        "flux operators take the reference form: x is torch.float32; kernels take bf16"
    ]


def _shared(rank: int, world_size: int) -> list[Any]:
    """Operators share an arena; a call has the settings of its operator."""
    machine = Machine()
    group = dist.group.WORLD
    assert group is not None
    seen = []
    x, weight = torch.zeros(LARGE, K).bfloat16(), torch.zeros(N, K).bfloat16()
    one = Selection(group, Settings(reserve_sms=7))
    other = Selection(group, Settings(mode="chunked", deadline_s=1.5))
    for chosen in (one, other, one):
        call = Call("gemm_rs", x.t().contiguous().t(), [weight], [None], "NK")
        _, bound = chosen.bind(call)
        assert call.x.is_contiguous()
        assert torch.equal(call.x, x)
        seen.append((bound.name, machine.reserved_sms, machine.deadline_ns))
    machine.num_sms = 0
    with pytest.raises(FluxError, match="reserve_sms is 7, and the device has 7 SMs"):
        Selection(group, Settings(reserve_sms=7)).bind(call)
    return seen


def test_each_call_has_the_settings_of_its_operator() -> None:
    wanted = [("fused", 7, 0), ("chunked", 0, 1_500_000_000), ("fused", 7, 0)]
    assert run_ranks(_shared, 2) == [wanted] * 2


def _bias_as_kernels_read_it(rank: int, world_size: int) -> list[bool]:
    """What a form is given of biases that are strided, expanded, misaligned, or fine."""
    machine, seen = Machine(), []

    def form(x: Tensor, weight: Tensor, bias: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(bias)
        return x.new_empty(x.shape[0] // 2, weight.shape[0])

    vars(machine)["_form"] = lambda _name: form
    x, weight = torch.zeros(LARGE, K).bfloat16(), torch.zeros(N, K).bfloat16()
    right = torch.arange(4.0 * N).bfloat16()
    given = [right[: 2 * N : 2], right[:1].expand(N), right[1 : N + 1], right[:N]]
    for bias in given * 2:  # each form's first look and a later one
        GemmReduceScatter(dist.group.WORLD)(x, weight, bias)
    read = [
        got.is_contiguous() and got.data_ptr() % 16 == 0 and torch.equal(got, bias)
        for got, bias in zip(seen, given * 2, strict=True)
    ]
    return [*read, seen[-1] is given[-1]]


def test_a_bias_that_kernels_cannot_read_is_copied() -> None:
    assert run_ranks(_bias_as_kernels_read_it, 2) == [[True] * 9] * 2


def test_the_current_device_must_be_that_of_x() -> None:
    local_checks.refuse_other_device("x", torch.device("cuda:1"), 1)
    with pytest.raises(FluxError) as caught:
        local_checks.refuse_other_device("x", torch.device("cuda:1"), 0)
    assert str(caught.value) == (
        "x is on cuda:1 and the current device is cuda:0; call torch.cuda.set_device(1) first"
    )


def _on_another_device(rank: int, world_size: int) -> str:
    """Said before peers are asked anything: this rank alone calls."""
    group = dist.group.WORLD
    assert group is not None
    if rank == 1:
        return ""
    vars(torch.cuda)["current_device"] = lambda: 0
    chosen = Selection(group, Settings())
    chosen.checks._devices = frozenset({"cuda"})
    vars(local_checks)["check"] = lambda *_, **__: None
    for module in (local_checks, selection):
        vars(module)["check_tensors"] = lambda _call: None
    x: Any = SimpleNamespace(
        device=torch.device("cuda:1"), is_cuda=False, shape=(LARGE, K), dtype=torch.bfloat16
    )
    with pytest.raises(FluxError) as caught:
        chosen.bind(Call("gemm_rs", x, [], [], "NK"))
    return str(caught.value)


@pytest.mark.full
def test_another_current_device_is_refused_before_anything_collective() -> None:
    assert run_ranks(_on_another_device, 2)[0].startswith("x is on cuda:1 and the current device")


def _set_device_between_calls(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What is said of three calls that look alike, while the current device is 1, 0 and 1."""
    group = dist.group.WORLD
    assert group is not None
    chosen = Selection(group, Settings("reference"))
    chosen.checks._devices = frozenset({"cuda"})
    vars(torch.cuda)["is_current_stream_capturing"] = lambda: False
    for name in ("check", "check_rows"):
        vars(local_checks)[name] = lambda *_, **__: 3
    for module in (local_checks, selection):
        vars(module)["check_tensors"] = lambda _call: None
    x: Any = SimpleNamespace(
        device=torch.device("cuda:1"), is_cuda=True, shape=(LARGE, K), dtype=torch.bfloat16
    )

    def said(call: Callable[[], object], current: int) -> str:
        vars(torch.cuda)["current_device"] = lambda: current
        try:
            call()
        except FluxError as error:
            return str(error)
        return ""

    calls: list[Callable[[], object]] = [
        lambda: chosen.bind(Call("gemm_rs", x, [], [], "NK")),
        lambda: chosen.checks.rows(x, 8),
    ]
    of_product, of_rows = [[said(call, current) for current in (1, 0, 1)] for call in calls]
    return of_product, of_rows


def test_another_current_device_is_refused_in_every_call() -> None:
    """Of a call that looks like an earlier one, too: else the driver would, after its turn."""
    ((of_product, of_rows),) = run_ranks(_set_device_between_calls, 1)
    for first, second, third in (of_product, of_rows):
        assert (first, third) == ("", "")
        assert second.startswith("x is on cuda:1 and the current device is cuda:0")


class _NoHash:
    """A number of rows, as an array of one number is."""

    __hash__ = None  # type: ignore[assignment]

    def __index__(self) -> int:
        return 8


def _rows_without_a_hash(rank: int, world_size: int) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    checks = Selection(group, Settings()).checks
    number: Any = _NoHash()
    return [checks.rows(torch.zeros(4, K), rows) for rows in (number, 8, number)]


def test_rows_may_be_any_whole_number() -> None:
    assert run_ranks(_rows_without_a_hash, 2) == [[8, 8, 8]] * 2


def _pairs(rank: int, world_size: int) -> dict[str, list[str]]:
    """What takes two products: by settings, for few rows and many, with the engine and without."""
    Machine()
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for settings in (
        Settings(),
        Settings(reserve_sms=8),
        Settings(spin=False),
        Settings("fused"),
        Settings("chunked"),
        Settings("chunked", spin=False),
        Settings("reference"),
    ):
        taken = []
        for m, tiles in ((SMALL, [Tiles(1)]), (LARGE, [Tiles(1)]), (LARGE, [])):
            fused = {"configs": lambda *_, tiles=tiles: tiles, "fused": None}
            vars(choice)["pair"] = SimpleNamespace(**fused)
            x, weight = torch.zeros(m, K).bfloat16(), torch.zeros(N, K).bfloat16()
            call = Call("gemm_rs", x, [weight], [None], "NK", pair=(x, weight))
            taken.append(Selection(group, settings).bind(call)[1].name)
        found[str(settings)] = taken
    return found


def test_two_products_are_one_kernel_where_it_may_spin_and_is_there() -> None:
    for found in run_ranks(_pairs, 2):
        assert list(found.values()) == [
            ["plain", "fused", "plain"],
            ["nccl", "fused", "nccl"],  # our reduce-scatter would wait on reserved SMs too
            ["nccl", "nccl", "nccl"],
            ["fused", "fused", "plain"],
            ["plain", "plain", "plain"],
            ["nccl", "nccl", "nccl"],
            ["nccl", "nccl", "nccl"],
        ]


def test_modes_of_the_settings_are_those_of_the_configuration() -> None:
    assert get_args(FluxMode) == get_args(ParallelismConfig.model_fields["flux"].annotation)
