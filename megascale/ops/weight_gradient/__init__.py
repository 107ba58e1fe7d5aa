"""Weight gradients that accumulate in fp32: main_grad[O, I] += grad_y[T, O]^T @ x[T, I].

On Hopper, over enough rows, a kernel of our own adds finished tiles to memory while it multiplies
the next ones, and takes the operands of several micro-batches at once (`hopper.py`): at T = 2048,
O = I = 12288, four of them 0.89 ms each where cuBLAS's accumulating GEMM takes 1.09, and its GEMM
that only writes bf16 0.95 (docs/log.md). Elsewhere torch's GEMM with fp32 output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def _hopper_sms(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU on which the kernel can be compiled, else 0."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    try:
        import megascale.ops.weight_gradient.launch  # noqa: F401 - triton may not be there
    except ImportError:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def add_weight_gradient(
    main_grad_OI: Tensor, *pairs: tuple[Tensor, Tensor], overwrite: bool = False
) -> None:
    """main_grad += sum of grad_y^T @ x over `pairs` (grad_y_TO, x_TI), in main_grad's precision.

    overwrite  = in place of +=; what main_grad held does not matter then
    Several pairs (micro-batches) cost one reading and writing of main_grad.
    """
    num_sms = _hopper_sms(main_grad_OI.device)
    if num_sms:
        from megascale.ops.weight_gradient.launch import MOST_PAIRS, can_launch, launch, pays

        for first in range(0, len(pairs), MOST_PAIRS):
            some = pairs[first : first + MOST_PAIRS]
            if pays(some) and can_launch(main_grad_OI, some):
                launch(main_grad_OI, some, overwrite=overwrite, num_sms=num_sms)
            else:
                _add_one_by_one(main_grad_OI, some, overwrite=overwrite)
            overwrite = False
        return
    _add_one_by_one(main_grad_OI, pairs, overwrite=overwrite)


def _add_one_by_one(
    main_grad_OI: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], *, overwrite: bool
) -> None:
    for i, (grad_y_TO, x_TI) in enumerate(pairs):
        add_by_library(main_grad_OI, grad_y_TO, x_TI, overwrite=overwrite and i == 0)


def add_by_library(
    main_grad_OI: Tensor, grad_y_TO: Tensor, x_TI: Tensor, *, overwrite: bool = False
) -> None:
    """The same by torch: the reference, and what runs where the kernel does not."""
    grad_y_OT = grad_y_TO.t()
    if main_grad_OI.dtype == x_TI.dtype:
        main_grad_OI.addmm_(grad_y_OT, x_TI, beta=0 if overwrite else 1)
    elif main_grad_OI.is_cuda and main_grad_OI.dtype == torch.float32:
        if overwrite:
            torch.mm(grad_y_OT, x_TI, out_dtype=torch.float32, out=main_grad_OI)
        else:
            torch.addmm(main_grad_OI, grad_y_OT, x_TI, out_dtype=torch.float32, out=main_grad_OI)
    else:
        wide = main_grad_OI.dtype
        main_grad_OI.addmm_(grad_y_OT.to(wide), x_TI.to(wide), beta=0 if overwrite else 1)
