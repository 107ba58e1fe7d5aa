"""Attention inside documents on one GPU: the ways to mask packed documents, and what it saves.

    python -m benchmarks.document_mask [--output FILE] [--commit HASH] [--rounds N]

Each case is a forward and a backward pass in bf16 of packed documents whose lengths are drawn at
random around a mean (exponential, seeded):
    packed    as a training step runs it: FlashAttention-2 on the documents as sequences
    flex      FlexAttention with a block mask of the documents; the mask is not in the time, but
              beside it (`block_mask_ms`, once a micro-batch)
    masked    scaled_dot_product_attention with a boolean mask [B, 1, S, S]
    causal    attention without documents, the kernel of training without a document mask
The roof is the FLOPs of the pairs that are seen (forward 4, backward 10 a pair, head and
dimension), over the device's named peak. Values and gradients of every way are compared with fp64
on one group of heads before anything is timed; ways are interleaved and queued behind a kernel that
waits.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import writable_file
from benchmarks.operators import _time
from megascale.env import installed_versions
from megascale.ops.attention import attention, attention_reference
from megascale.ops.documents import Documents, make_documents
from megascale.units import peak_tflops

LOW = torch.bfloat16
MOST_ERROR = 2e-2  # relative, in the 2-norm
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """B sequences of S tokens; `mean` tokens a document, None: one a sequence."""

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    mean: int | None
    window: int | None = None
    head_dim: int = 128

    @property
    def shape(self) -> str:
        return (
            f"b{self.batch} s{self.seq_len} h{self.heads}/{self.kv_heads} d{self.head_dim} "
            f"window {self.window}"
        )

    def documents(self) -> Documents:
        generator = torch.Generator().manual_seed(1)
        starts_BS = torch.zeros(self.batch, self.seq_len, dtype=torch.int64)
        if self.mean is not None:
            begins = torch.rand(starts_BS.shape, generator=generator) < 1 / self.mean
            starts_BS = torch.where(begins, torch.arange(self.seq_len), 0).cummax(1).values
        return make_documents(starts_BS, lambda host: host.pin_memory().cuda(non_blocking=True))


def cases() -> list[Case]:
    """A 7B's layer at 2,048 tokens and an 8B's at 8,192, packed loosely to tightly."""
    found = [Case(4, 2048, 24, 24, mean) for mean in (None, 1024, 256)]
    found += [Case(1, 8192, 32, 8, mean) for mean in (None, 4096, 1024, 256)]
    found += [Case(1, 8192, 32, 8, 4096, window=2048), Case(1, 8192, 32, 8, 1024, window=768)]
    return found


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@functools.cache
def _compiled_block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


def block_mask(case: Case, documents: Documents) -> Callable[[], Any]:
    """Makes FlexAttention's, on the device from the documents' starts."""
    starts_BS, window = documents.starts_BS, case.window

    def seen(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (key <= query) & (key >= starts_BS[b, query])
        return visible if window is None else visible & (query - key < window)

    size = (case.batch, None, case.seq_len, case.seq_len)
    return lambda: _compiled_block_mask()(seen, *size, device=starts_BS.device)


def ways(case: Case, documents: Documents) -> dict[str, Way]:
    """How each way computes `[B, S, K, H]`; `causal` computes something else."""
    blocks, mask = block_mask(case, documents)(), documents.visible(case.window)
    grouped = case.heads != case.kv_heads

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, window=case.window, documents=documents)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y: Tensor = _compiled_flex()(q, k, v, block_mask=blocks, enable_gqa=grouped)
        return y.transpose(1, 2)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, window=case.window)

    return {"packed": packed, "flex": flex, "masked": masked, "causal": causal}


def _leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in inputs]


def check(case: Case, documents: Documents, inputs: Sequence[Tensor], grad: Tensor) -> float:
    """The largest relative error of any way, results and gradients, against fp64."""
    share = case.heads // case.kv_heads
    heads = (share, 1, 1)
    one = [x[:, :, :count].contiguous() for x, count in zip(inputs, heads, strict=True)]
    wide = _leaves([x.double() for x in one])
    y = attention_reference(*wide, window=case.window, documents=documents)
    wanted = [y, *torch.autograd.grad(y, wide, grad[:, :, :share].double())]
    narrow = Case(case.batch, case.seq_len, share, 1, case.mean, case.window, case.head_dim)
    errors = []
    for name, way in ways(narrow, documents).items():
        if name == "causal":
            continue
        leaves = _leaves(one)
        y = way(*leaves)
        found = [y, *torch.autograd.grad(y, leaves, grad[:, :, :share].contiguous())]
        errors += [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)
        ]
    return max(errors)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """A row without what all rows share. SystemExit where values are wrong."""
    documents = case.documents()
    generator = torch.Generator(device="cuda").manual_seed(2)
    counts = (case.heads, case.kv_heads, case.kv_heads)
    shapes = [(case.batch, case.seq_len, count, case.head_dim) for count in counts]
    inputs = [torch.randn(s, device="cuda", generator=generator).to(LOW) for s in shapes]
    grad = torch.randn(shapes[0], device="cuda", generator=generator).to(LOW)
    error = check(case, documents, inputs, grad)
    if not error < MOST_ERROR:
        raise SystemExit(f"{case.shape}, mean {case.mean}: off by {error:.2e}; nothing is timed")
    torch.compiler.reset()  # one function for all cases: the ninth shape would not be compiled
    timed, make_block_mask = ways(case, documents), block_mask(case, documents)
    times: dict[str, list[float]] = {name: [] for name in (*timed, "block_mask")}
    for number in range(rounds + 3):
        elapsed = {"block_mask": _time(make_block_mask)}
        for name, way in timed.items():
            leaves = _leaves(inputs)
            elapsed[name] = _time(
                lambda way=way, leaves=leaves: torch.autograd.grad(way(*leaves), leaves, grad)  # type: ignore[misc]
            )
        if number >= 3:
            for name, value in elapsed.items():
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    block_mask_ms = medians.pop("block_mask")
    pairs = int(documents.visible(case.window).sum())
    peak = peak_tflops(torch.cuda.get_device_name())
    flops = 14 * pairs * case.heads * case.head_dim
    roof = {} if peak is None else {"roof": flops / peak[0] / 1e9}
    shown = "  ".join(f"{name} {value:6.2f}" for name, value in (medians | roof).items())
    print(
        f"{case.shape:36} mean {case.mean!s:5} ms: {shown}  block mask {block_mask_ms:5.2f}  "
        f"off by {error:.0e}"
    )
    value = medians.pop("packed")
    return {
        "bench": "document_mask",
        "case": {"shape": case.shape, "mean_document": case.mean},
        "metric": "ms",
        "value": value,
        "baselines": medians | roof,
        "block_mask_ms": block_mask_ms,
        "documents": len(documents.bounds_N) - 1,
        "longest": documents.longest,
        "error": error,
        "stats": {"rounds": rounds, "min": min(times["packed"]), "max": max(times["packed"])},
    }


def main() -> None:
    """Print a line a case; append a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    shared = {
        "device": torch.cuda.get_device_name(),
        "num_devices": 1,
        "commit": arguments.commit,
        "dirty": not arguments.commit,
        "versions": installed_versions(("torch", "triton")),
        "command": f"python -m benchmarks.document_mask --rounds {arguments.rounds}",
    }
    for case in cases():
        row = measure(case, arguments.rounds)
        row |= {**shared, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        if arguments.output:
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
