"""Bitwise replay: three training steps of a small model on fixed input; what bits come out?

Devices of a kind under one torch must give the same bits, and one device the same bits twice. One
that does not computes wrongly without a word (silent data corruption): about one device in a
thousand, by published counts. A hash of parameters says nothing about which is right, so devices
and nodes are compared with each other, by the caller.

The model is one of `megascale.model`, with operators in plain mode: nothing is compiled, and
torch's deterministic algorithms cover every kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.model.context import make_context
from megascale.model.initialise import initialise
from megascale.model.transformer import TransformerChunk
from megascale.ops.cross_entropy import cross_entropy

STEPS = 3
LEARNING_RATE = 0.1
SEED = 20
SMALL = {"preset": "tiny-gpt", "num_layers": 2, "hidden_size": 256, "num_heads": 4}
CPU_TOKENS, GPU_TOKENS = (2, 64), (16, 256)  # sequences, positions; on a GPU enough for all its SMs


def run(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """The hash of every device, of two runs.

    arguments  cpu_kind; flip: True flips a bit in the second run on the last device
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    hashes = []
    for device in devices:
        tell(str(device))
        flip = bool(arguments.get("flip")) and device == devices[-1]
        kind = _kind(device, arguments["cpu_kind"])
        runs = [train_and_hash(device), train_and_hash(device, flip)]
        hashes.append({"at": str(device), "kind": kind, "runs": runs})
    return {"hashes": hashes, "gpus": len(devices) - 1}


def train_and_hash(device: torch.device, flip: bool = False) -> str:
    """SHA-256 of the parameters' bits after `STEPS` steps of gradient descent.

    flip  one bit of a weight, after the first step
    """
    cfg = ModelConfig.model_validate(SMALL)
    on_cpu = device.type == "cpu"
    num_sequences, seq_len = CPU_TOKENS if on_cpu else GPU_TOKENS
    model = TransformerChunk(
        cfg, range(cfg.num_layers), embed=True, head=True, num_positions=GPU_TOKENS[1]
    )
    initialise(model, cfg, SEED)
    model.to(device=device, dtype=torch.float32 if on_cpu else torch.bfloat16)
    generator = torch.Generator().manual_seed(SEED)
    tokens_BS = torch.randint(cfg.vocab, (num_sequences, seq_len + 1), generator=generator)
    tokens_BS = tokens_BS.to(device)
    for step in range(STEPS):
        _step(model, tokens_BS)
        if flip and step == 0:
            _flip_a_bit(next(model.parameters()))
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(_bits(parameter).cpu().numpy().tobytes())
    return digest.hexdigest()


def _step(model: TransformerChunk, tokens_BS: Tensor) -> None:
    num_sequences, seq_len = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    context = make_context(num_sequences, seq_len, tokens_BS.device, operators="plain")
    logits_TV = model(tokens_BS[:, :-1].flatten(), context)
    labels_T = tokens_BS[:, 1:].flatten()
    mask_T = torch.ones(labels_T.shape, device=labels_T.device)
    cross_entropy(logits_TV, labels_T, mask_T, mode="plain").sum().div(len(labels_T)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
                parameter.grad = None


def _flip_a_bit(parameter: Tensor) -> None:
    _bits(parameter).view(-1)[0] ^= 1 << 6


def _bits(parameter: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    widths = {2: torch.int16, 4: torch.int32}
    return parameter.detach().view(widths[parameter.element_size()])


def _kind(device: torch.device, cpu_kind: str) -> str:
    """Devices for which the bits must agree."""
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{cpu_kind}, {capability}, torch {torch.__version__}"
    name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
