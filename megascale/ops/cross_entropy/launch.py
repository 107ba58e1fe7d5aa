"""Launches of the cross-entropy's kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megascale.kernels.kernel_call import launch
from megascale.ops.cross_entropy.kernel import gradient_kernel, row_statistics_kernel

BLOCK = 4096  # two 16-byte pieces a thread
NUM_WARPS = 8


def launch_statistics(
    logits_Tv: Tensor, labels_T: Tensor, vocab_start: int, num_valid: int
) -> Tensor:
    """fp32 [3, T]."""
    assert logits_Tv.stride(1) == 1, logits_Tv.stride()
    num_rows = logits_Tv.shape[0]
    statistics_3T = torch.empty(3, num_rows, dtype=torch.float32, device=logits_Tv.device)
    launch(
        row_statistics_kernel,
        num_rows,
        {
            "logits_ptr": logits_Tv,
            "labels_ptr": labels_T.contiguous(),
            "statistics_ptr": statistics_3T,
            "num_rows": num_rows,
            "row_stride": logits_Tv.stride(0),
            "num_valid": num_valid,
            "vocab_start": vocab_start,
        },
        {"BLOCK": BLOCK, "num_warps": NUM_WARPS},
    )
    return statistics_3T


def launch_gradient(
    logits_Tv: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    scale_T: Tensor,
    vocab_start: int,
    num_valid: int,
) -> None:
    """Overwrite the logits by their gradient."""
    assert logits_Tv.stride(1) == 1, logits_Tv.stride()
    num_rows, num_columns = logits_Tv.shape
    num_blocks = -(-num_columns // BLOCK)
    launch(
        gradient_kernel,
        num_rows * num_blocks,
        {
            "logits_ptr": logits_Tv,
            "labels_ptr": labels_T.contiguous(),
            "lse_ptr": lse_T.float().contiguous(),
            "scale_ptr": scale_T.float().contiguous(),
            "num_columns": num_columns,
            "row_stride": logits_Tv.stride(0),
            "num_valid": num_valid,
            "vocab_start": vocab_start,
            "num_blocks": num_blocks,
        },
        {"BLOCK": BLOCK, "num_warps": NUM_WARPS},
    )
    increment_version(logits_Tv)  # autograd refuses what is read after it was overwritten
