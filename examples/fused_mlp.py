"""Train a plain PyTorch MLP whose tensor-parallel communication hides inside its GEMMs.

    torchrun --standalone --nproc-per-node 2 examples/fused_mlp.py

On GPUs with NVLink the operators run as fused kernels, elsewhere as a collective and a GEMM; the
program is the same, and so is its loss for any number of ranks that divides tokens and columns.

T tokens, D hidden, F ffn; a lower-case letter is the part of this rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megascale.env import switch_multicast_off
from megascale.flux import TensorOps, column_parallel_linear, row_parallel_linear

TOKENS, HIDDEN, FFN, STEPS = 512, 256, 1024, 20


class FusedMlp(nn.Module):
    """This rank's tokens in, this rank's tokens out; the weights are spread over the ranks."""

    def __init__(self, ops: TensorOps, up_FD: Tensor, down_DF: Tensor) -> None:
        super().__init__()
        rank, ranks = ops.all_gather_gemm.rank, ops.all_gather_gemm.world_size
        self.ops = ops
        self.up = nn.Parameter(up_FD.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down_DF.chunk(ranks, dim=1)[rank].contiguous())

    def forward(self, x_tD: Tensor) -> Tensor:
        h_Tf = column_parallel_linear(x_tD, self.up, None, self.ops)
        return row_parallel_linear(F.gelu(h_Tf), self.down, None, self.ops)


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        print(
            "usage: torchrun --standalone --nproc-per-node 2 examples/fused_mlp.py", file=sys.stderr
        )
        sys.exit(2)
    switch_multicast_off()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device("cuda" if on_gpu else "cpu")
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    if TOKENS % ranks or FFN % ranks:
        sys.exit(f"{ranks} ranks do not divide {TOKENS} tokens and {FFN} columns: take 1, 2, 4")
    torch.manual_seed(0)  # the same whole tensors on every rank, which takes its part
    mlp = FusedMlp(
        TensorOps.of(dist.group.WORLD),
        torch.randn(FFN, HIDDEN) / HIDDEN**0.5,
        torch.randn(HIDDEN, FFN) / FFN**0.5,
    )
    x_tD, wanted_tD = (torch.randn(TOKENS, HIDDEN).chunk(ranks)[rank] for _ in range(2))
    optimizer = torch.optim.SGD(mlp.parameters(), lr=3.0)
    losses = []
    for _ in range(STEPS):
        loss = (mlp(x_tD) - wanted_tD).float().square().sum() / (TOKENS * HIDDEN)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    if rank == 0:
        print(f"{ranks} ranks: loss {total[0]:.4f} -> {total[-1]:.4f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
