"""An MLP spread over ranks with the plain functions of `megascale.flux`: a collective and a GEMM.

fused_mlp.py has the fused operators and gradients.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel_mlp.py

Tokens lie split over the ranks before and after (sequence parallelism). The first linear gathers
them and holds a part of the rows of its weight; the second holds a part of the columns, and its
reduce-scatter splits the tokens again. The program checks the result against the whole MLP.

T tokens, D hidden, F ffn; a lower-case letter is the part of this rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux import all_gather_gemm, gemm_reduce_scatter

T, D, F = 64, 32, 128


def mlp(x_tD: Tensor, up_fD: Tensor, down_Df: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens in, this rank's tokens out."""
    h_Tf, _ = all_gather_gemm(x_tD, up_fD, None, group)
    return gemm_reduce_scatter(torch.relu(h_Tf), down_Df, group)


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        print(
            "usage: torchrun --standalone --nproc-per-node 2 examples/tensor_parallel_mlp.py",
            file=sys.stderr,
        )
        sys.exit(2)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None

    if T % ranks or F % ranks:
        sys.exit(f"{ranks} ranks do not divide {T} tokens and {F} columns: take 1, 2, 4, 8, ...")
    torch.manual_seed(0)
    x_TD = torch.randn(T, D).to(device)
    up_FD, down_DF = torch.randn(F, D).to(device), torch.randn(D, F).to(device)

    x_tD = x_TD.chunk(ranks)[rank]
    y_tD = mlp(x_tD, up_FD.chunk(ranks)[rank], down_DF.chunk(ranks, dim=1)[rank], group)

    whole_TD = torch.relu(x_TD @ up_FD.t()) @ down_DF.t()
    torch.testing.assert_close(y_tD, whole_TD.chunk(ranks)[rank], rtol=1e-4, atol=1e-3)
    print(f"rank {rank} of {ranks}: {tuple(y_tD.shape)} equals its rows of the whole MLP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
