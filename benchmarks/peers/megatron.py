"""Train a few steps with Megatron-Core and print one line of JSON (`result.py`).

    python -m torch.distributed.run --nproc_per_node 2 -m benchmarks.peers.megatron \
        --model gpt3-175b-4l --tp 2 --mbs 1 --gbs 16

Random tokens, made on the device. The loop is that of Megatron's own example: its schedule of
forwards and backwards (interleaved where --vp is above 1), then its optimizer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import wgrad
from benchmarks.peers.clock import StepClock, over_ranks
from benchmarks.peers.options import Options, add_options, read_options, require
from benchmarks.peers.result import (
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_CODE,
    Result,
    as_line,
    expected_gpt_loss,
    failure_line,
)
from megascale.env import rank_environment, switch_multicast_off
from megascale.errors import MegascaleError

SYSTEM = "megatron_core"
TITLE = "Megatron-Core 0.19.2"
MODULES = ("megatron",)
# Its column-parallel linears count on one hardware queue to order transfers before GEMMs.
VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 2 for what cannot run, 3 where the device's memory is too small."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.megatron")
    add_options(parser)
    parser.add_argument("--fused-wgrad", action="store_true", help="torch's GEMM for Apex's")
    parser.add_argument("--recompute-layers", type=int, default=0, help="of each rank, in full")
    parsed = parser.parse_args(arguments)
    try:
        options = read_options(parsed)
        require(TITLE, MODULES)
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return 2
    os.environ.update(VARIABLES)
    switch_multicast_off()
    try:
        result = run(
            options, fused_wgrad=parsed.fused_wgrad, recompute_layers=parsed.recompute_layers
        )
    except torch.OutOfMemoryError as error:
        print(failure_line(SYSTEM, OUT_OF_MEMORY), error, sep="\n", flush=True)
        return OUT_OF_MEMORY_CODE
    if result is not None:
        print(as_line(result), flush=True)
    return 0


def run(options: Options, *, fused_wgrad: bool, recompute_layers: int) -> Result | None:
    """Train; the result on rank 0."""
    if fused_wgrad:
        wgrad.offer()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from benchmarks.peers import megatron_model

    device = _start_ranks(options)
    parallel_state.initialize_model_parallel(
        options.tp,
        options.pp,
        virtual_pipeline_model_parallel_size=options.vp if options.vp > 1 else None,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(options.seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(options.seed)
    peer = megatron_model.build(options, fused_wgrad=fused_wgrad, recompute_layers=recompute_layers)
    steps = Steps(peer, options, device)
    clock = StepClock(device)
    for _ in range(options.steps):
        clock.mark()
        steps.run_one()
    clock.mark()
    result = Result(
        system=SYSTEM,
        version=version("megatron-core"),
        model=options.name,
        expected_loss=expected_gpt_loss(options.model),
        settings={
            "attention": megatron_model.TorchAttention.chosen,
            "norm": "torch",
            "wgrad": "fused into fp32" if fused_wgrad else "bf16, then added in fp32",
            "optimizer": "torch AdamW, fused, distributed",
            "parameters": "bfloat16 with fp32 master",
            "gradients": "float32",
            "recompute_layers": recompute_layers,
        },
        **over_ranks(clock, steps.losses(), device),
    )
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return result if is_first else None


def _start_ranks(options: Options) -> torch.device:
    """Join the ranks; this rank's device."""
    local_rank = rank_environment().local_rank
    timeout = timedelta(seconds=180)  # a first step may compile; a rank that died is noticed
    if options.device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return device


class Steps:
    """Steps of one rank. Tokens are random; ranks of one data-parallel rank draw the same."""

    def __init__(self, peer: Any, options: Options, device: torch.device) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._peer = peer
        self._options = options
        self._device = device
        self._positions_BS = torch.arange(options.seq, device=device).expand(options.mbs, -1)
        dp_rank = parallel_state.get_data_parallel_rank()
        iterators = [self._batches(options.seed + dp_rank) for _ in peer.chunks]
        several = len(peer.chunks) > 1
        self._data: Any = iterators if several else iterators[0]
        self._model: Any = peer.chunks if several else peer.chunks[0]
        self._schedule = get_forward_backward_func()
        self._losses: list[Tensor] = []

    def run_one(self) -> None:
        """One step: all micro-batches, then the update."""
        options = self._options
        for chunk in self._peer.chunks:
            chunk.zero_grad_buffer()
        self._peer.optimizer.zero_grad()
        found = self._schedule(
            forward_step_func=self._forward,
            data_iterator=self._data,
            model=self._model,
            num_microbatches=options.num_micro_batches,
            seq_length=options.seq,
            micro_batch_size=options.mbs,
            forward_only=False,
        )
        self._peer.optimizer.step()
        if found:  # the last stage has losses
            self._losses.append(torch.stack([one["loss"] for one in found]).mean())

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]

    def _forward(self, data: Iterator[tuple[Tensor, Tensor]], chunk: Any) -> tuple[Tensor, Any]:
        tokens_BS, labels_BS = next(data)
        out = chunk(tokens_BS, self._positions_BS, None, labels=labels_BS)
        return out, _mean_loss

    def _batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        options = self._options
        generator = torch.Generator(self._device).manual_seed(seed)
        size = (options.mbs, options.seq + 1)
        while True:
            tokens = torch.randint(
                options.model.vocab, size, generator=generator, device=self._device
            )
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _mean_loss(loss_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What Megatron's schedule wants: the loss to differentiate and what it should collect."""
    loss = loss_BS.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place


if __name__ == "__main__":
    sys.exit(main())
