"""Column sums: the kernels interpreted and on a GPU, and how rows are shared."""

from __future__ import annotations

import pytest
import torch

from megascale.ops.column_sum import accumulate_partials, partial_column_sums
from tests.ops.kernels import interpreted, leaf, near, with_main_grad

CASES = [(1, 1), (5, 7), (33, 256), (100, 520)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_interpreted(dtype: torch.dtype) -> None:
    interpreted(_check, dtype, "cpu", CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    _check(dtype, "cuda", [*CASES, (2048, 18432), (4097, 1000), (8, 50000)])


def _check(dtype: torch.dtype, device: str, cases: list[tuple[int, int]]) -> None:
    for rows, columns in cases:
        x = torch.randn(rows, columns + 3, device=device).to(dtype)
        for view in (x[:, :columns], x[:1, :1].expand(rows, columns), x.t()):
            sums = view.double().sum(0)
            scale = float(view.double().abs().sum(0).max())
            partials = partial_column_sums(view)
            near(partials.double().sum(0), sums, torch.float32, scale)
            assert torch.equal(partials, partial_column_sums(view))
            for stale in (False, True):
                bias = leaf(view.shape[1], dtype=dtype).detach().to(device)
                bias.main_grad = torch.ones(view.shape[1], device=device)  # type: ignore[attr-defined]
                bias.main_grad_stale = stale  # type: ignore[attr-defined]
                assert accumulate_partials(bias, partials) is None
                wanted = sums if stale else 1 + sums
                near(bias.main_grad, wanted, torch.float32, scale + 1)  # type: ignore[attr-defined]
                apart = torch.ones(view.shape[1], 2, device=device)  # columns beside other values
                bias.main_grad = apart[:, 0]  # type: ignore[attr-defined]
                bias.main_grad_stale = stale  # type: ignore[attr-defined]
                assert accumulate_partials(bias, partials) is None
                near(apart[:, 0], wanted, torch.float32, scale + 1)
                assert bool((apart[:, 1] == 1).all())
            plain = leaf(view.shape[1], dtype=dtype).detach().to(device)
            gradient = accumulate_partials(plain, partials)
            assert gradient is not None
            assert gradient.dtype == dtype
            near(gradient, sums, dtype, scale)


def test_rows_are_shared_by_whole_tiles_and_all_are_taken() -> None:
    pytest.importorskip("triton")
    from megascale.ops.column_sum.launch import MOST_PROGRAMS, rows_of_program

    for num_rows in (1, 7, 64, 2048, 4099):
        for num_blocks in (1, 3, 96, 4000):
            rows = rows_of_program(num_rows, num_blocks, 8)
            splits = -(-num_rows // rows)
            assert rows % 8 == 0
            assert (splits - 1) * rows < num_rows <= splits * rows
            assert splits == 1 or splits * num_blocks <= MOST_PROGRAMS
    assert rows_of_program(2048, 96, 8) == 104  # 20 programs a block of columns


def test_main_gradients_of_another_dtype_are_added_to() -> None:
    bias = with_main_grad(torch.zeros(3, dtype=torch.float64))
    assert accumulate_partials(bias, torch.tensor([[1.0, 2.0, 3.0]] * 2)) is None
    assert bias.main_grad.tolist() == [3.0, 5.0, 7.0]  # type: ignore[attr-defined]
