"""The optimizer's kernels, interpreted: torch's values within fp32 rounding; bits where masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.optim import Flat, Optimizer, Reductions, build_optimizer, kernel_updates, tiles
from tests.distributed import run_ranks
from tests.flux.interpreted import ROUNDING
from tests.flux.shared_arena import interpret_kernels
from tests.optim.shards import make_flats, masters, random_like, set_grads

pytest.importorskip("triton")

OptimizerName = Literal["adamw", "lamb"]
# With tiles of 160 and blocks of 64: parameters of less than a block, of exactly a tile, of several
# tiles and a rest; the second starts where 16 does not divide.
SHAPES = {
    "a.weight": (9, 5),
    "b.weight": (16, 10),
    "c.weight": (31, 13),
    "d.bias": (70,),
    "e": (3,),
}
PARAMS = random_like({n: torch.empty(s) for n, s in SHAPES.items()}, seed=0)
NAMES = tuple(PARAMS)
CASES: list[tuple[OptimizerName, float, float, bool]] = [
    ("adamw", 1.0, 0.1, True),
    ("adamw", 0.0, 0.0, False),
    ("lamb", 1.0, 0.1, True),
    ("lamb", 0.0, 0.0, False),
]


def _flats(parameters: bool) -> list[Flat]:
    flats = make_flats(PARAMS, replicated=("e",), tied_copy=("b.weight",))
    for flat in flats:
        if parameters:
            flat.parameters = flat.master.bfloat16()
    return flats


def _small_pieces() -> None:
    interpret_kernels()
    tiles.TILE = 160
    kernel_updates.BLOCK = 64


def _bits(optimizer: Optimizer) -> list[Tensor]:
    tensors = [*optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.step_count]
    for flat in optimizer.flats:
        tensors += [flat.master] + ([] if flat.parameters is None else [flat.parameters])
    return [tensor.clone() for tensor in tensors]


def _equals_torch(rank: int, _: int) -> None:
    _small_pieces()
    for name, clip_grad, weight_decay, parameters in CASES:
        cfg = OptimizerConfig(name=name, clip_grad=clip_grad, weight_decay=weight_decay)
        optimizers = [
            build_optimizer(cfg, _flats(parameters), Reductions(NAMES, tp_rank=1), kernels=kernels)
            for kernels in (True, True, False)
        ]
        for step in range(4):
            grads = random_like(PARAMS, seed=step + 1)
            if step == 2:
                grads["c.weight"][30, 12] = torch.nan
            before = _bits(optimizers[0])
            results = []
            for number, optimizer in enumerate(optimizers):
                set_grads(optimizer.flats, grads)
                if number == 1:
                    optimizer.gradient_is_final(1)  # the order of the sums does not change
                    optimizer.gradient_is_final(0)
                order: list[int] = []
                results.append(optimizer.step(1e-2, 0.5, updated=order.append))
                assert order == [0, 1]
            (first, second, torchs), (one, two, reference) = results, optimizers
            _same(first.norm, torchs.norm)
            _same(first.squared, torchs.squared)
            assert torch.equal(first.squared.isnan(), torchs.squared.isnan())
            assert first.squared[1] == first.squared[4] == 0.0  # a tied copy, a replica
            for a, b in zip(_bits(one), _bits(two), strict=True):
                assert torch.equal(a, b), "two runs differ"
            for a, b in zip(before, _bits(one), strict=True):
                assert torch.equal(a, b) == (step == 2)
            assert first.found_inf == second.found_inf == (step == 2)
            _compare(one, reference)


def _same(got: Tensor, expected: Tensor) -> None:
    """Sums in fp64 of the same values, in another order."""
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0, equal_nan=True)


def _compare(got: Optimizer, expected: Optimizer) -> None:
    for key, atol in (("exp_avg", 1e-7), ("exp_avg_sq", 1e-12)):  # the first may cancel
        for a, b in zip(got.state()[key], expected.state()[key], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=atol)
    for name, value in masters(got.flats).items():
        torch.testing.assert_close(value, masters(expected.flats)[name], rtol=2e-6, atol=1e-7)
    for flat in got.flats:
        if flat.parameters is not None:
            bound = flat.master.abs() * ROUNDING[torch.bfloat16]
            assert ((flat.parameters.float() - flat.master).abs() <= bound).all()


def _signed_zeros_and_empty_flats(rank: int, _: int) -> None:
    """A masked step keeps the sign of zeros; a rank without elements launches nothing."""
    _small_pieces()
    for name in ("adamw", "lamb"):
        params = {"w": torch.full((7, 11), -0.0)}
        flats = make_flats(params)
        cfg = OptimizerConfig(name=name)
        optimizer = build_optimizer(cfg, flats, Reductions(("w",)), kernels=True)
        set_grads(flats, {"w": torch.full((7, 11), torch.inf)})
        assert optimizer.step(1e-2).found_inf == 1
        assert torch.signbit(flats[0].master).all()
        assert not optimizer.exp_avg[0].any()
        assert optimizer.step_count == 0
        empty = Flat(torch.empty(0), torch.empty(0), False, [])
        alone = build_optimizer(cfg, [empty], Reductions(("v", "w")), kernels=True)
        assert alone.step(1e-2).norm == 0.0
        assert alone.step_count == 1


@pytest.mark.full
@pytest.mark.parametrize("program", [_equals_torch, _signed_zeros_and_empty_flats])
def test_interpreted(program: Callable[[int, int], None]) -> None:
    run_ranks(program, 1)


def test_tiles_cover_every_element_once_and_slots_are_in_the_order_of_names() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", 160)
        flats = _flats(parameters=False)
        index = {name: i for i, name in enumerate(NAMES)}
        cut = tiles.Tiles(flats, index, lambda segment: segment.name != "b.weight")
    slots: dict[int, list[int]] = {}
    for flat, of in zip(flats, cut.flats, strict=True):
        position = 0
        for first, size, slot, name in of.table.tolist():
            assert first == position
            assert 0 < size <= 160
            position += size
            if NAMES[name] != "b.weight":
                slots.setdefault(name, []).append(slot)
            else:
                assert slot == -1
        assert position == flat.master.numel()
    bounds = cut.bounds.tolist()
    for name, found in slots.items():
        assert found == list(range(bounds[name], bounds[name + 1]))
    assert cut.num_slots == bounds[-1] == sum(map(len, slots.values()))
    assert [of.aligned for of in cut.flats] == [False, False]
