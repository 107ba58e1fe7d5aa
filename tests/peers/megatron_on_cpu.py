"""Run `benchmarks.peers.megatron` on a CPU, as far as a program that assumes CUDA lets us.

    python -m torch.distributed.run --nproc_per_node 2 -m tests.peers.megatron_on_cpu \
        --device cpu --model tiny-gpt --tp 2 --gbs 4 --seq 32

megatron-core asks for the current CUDA device and makes tensors on "cuda" in many places. Here both
mean the CPU. Nothing of the peer's arithmetic or order of calls changes; what stays unproven is
what only a GPU has: NCCL, streams, cuDNN, memory.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.peers import wgrad


class CudaIsCpu(TorchFunctionMode):
    """`device="cuda"` makes a tensor on the CPU, and `.cuda()` leaves one there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:  # its optimizer sorts by this name
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = _cpu(kwargs["device"])
        return func(*args, **kwargs)


def _cpu(device: Any) -> Any:
    return torch.device("cpu") if str(device).startswith("cuda") else device


class _Stream:
    """A queue that is always empty."""

    def wait_stream(self, other: Any) -> None: ...


def pretend() -> None:
    """Before megatron-core is imported."""
    vars(torch.cuda).update(
        current_device=lambda: "cpu",
        synchronize=lambda *_: None,
        current_stream=lambda *_: _Stream(),
        stream=lambda _: contextlib.nullcontext(),
    )
    if "--fused-wgrad" in sys.argv:
        wgrad.offer()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    tracker = random.CudaRNGStatesTracker
    tracker.fork = lambda self, name="": contextlib.nullcontext()


def main() -> int:
    pretend()
    from benchmarks.peers import megatron

    with CudaIsCpu():
        return megatron.main()


if __name__ == "__main__":
    sys.exit(main())
