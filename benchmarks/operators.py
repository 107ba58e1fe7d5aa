"""The operators between the GEMMs on one GPU: fused, plain and compiled, against the memory's roof.

    python -m benchmarks.operators [--output FILE] [--commit HASH] [--rounds N]

Each case is a forward and a backward pass of one operator in bf16, of shapes of a training step:
    fused     as a training step runs it (`operators.mode = "fused"`)
    plain     torch's operations, a kernel each (`"plain"`)
    compiled  those under torch.compile with static shapes; of the cross-entropy torch's own
The roof is the bytes that the passes have to move, over the rate of a device copy in the same run.
Results and gradients of `fused` are compared with those of `plain` in fp64 before anything is
timed; passes are interleaved and queued behind a kernel that waits, so that no time is the host's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import writable_file
from megascale.env import installed_versions
from megascale.ops.activation import activation
from megascale.ops.cross_entropy import cross_entropy
from megascale.ops.heads import heads
from megascale.ops.linear import accumulate_bias_gradient
from megascale.ops.mode import OperatorMode
from megascale.ops.norm import residual_norm
from megascale.ops.rope import rope_table

LOW = torch.bfloat16
MOST_ERROR = 1e-2  # relative, in the 2-norm
Operator = Callable[[Sequence[Tensor], OperatorMode], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """An operator on tensors of these shapes.

    operator   `operator(tensors, mode) -> results`
    shapes     of the tensors that have gradients
    num_bytes  that a forward and a backward pass have to move
    owned      the first tensor is overwritten: a pass gets a copy, which is not timed
    compiled   what torch.compile gets in place of `operator`
    compiles   there is something to compile
    """

    name: str
    shape: str
    operator: Operator
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: float
    owned: bool = False
    compiled: Operator | None = None
    compiles: bool = True


def cases() -> list[Case]:
    """The shapes of a layer as wide as GPT-3's under TP2, and of a 7B and an 8B model."""
    found = []
    for tokens, hidden, kind in ((1024, 12288, "layernorm"), (4096, 4096, "rmsnorm")):
        found.append(_norm(tokens, hidden, kind == "layernorm"))
    for name, tokens, width in (
        ("gelu_tanh", 2048, 24576),
        ("gelu", 4096, 11008),
        ("swiglu", 4096, 2 * 14336),
    ):
        found.append(_activation(name, tokens, width))
    found.append(_bias(2048, 18432))
    found.append(_heads(2048, 48, 48, 128, rope=False))
    found.append(_heads(4096, 32, 8, 128, rope=True))
    found += [_loss(2048, 32000), _loss(4096, 64000)]
    return found


def _norm(tokens: int, hidden: int, layer_norm: bool) -> Case:
    def run(x: Sequence[Tensor], mode: OperatorMode) -> tuple[Tensor, ...]:
        return residual_norm(x[0], x[1], x[2], x[3] if layer_norm else None, 1e-5, mode)

    vectors = ((hidden,), (hidden,)) if layer_norm else ((hidden,),)
    name = "residual + " + ("layernorm" if layer_norm else "rmsnorm")
    shapes = ((tokens, hidden), (tokens, hidden), *vectors)
    return Case(name, f"{tokens}x{hidden}", run, shapes, 2 * 8 * tokens * hidden)


def _activation(name: str, tokens: int, width: int) -> Case:
    def run(x: Sequence[Tensor], mode: OperatorMode) -> tuple[Tensor, ...]:
        return (activation(name, x[0], x[1], mode),)

    outputs = width // 2 if name == "swiglu" else width
    num_bytes = 2 * tokens * (width + outputs + outputs + 2 * width)
    return Case(f"bias + {name}", f"{tokens}x{width}", run, ((tokens, width), (width,)), num_bytes)


class _AddBias(torch.autograd.Function):
    """Nothing forward; backward is the sum of a bias gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, rows: Tensor, mode: OperatorMode) -> Tensor:
        ctx.bias, ctx.rows, ctx.mode = bias, rows, mode
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        return accumulate_bias_gradient(ctx.bias, ctx.rows, ctx.mode), None, None


def _bias(tokens: int, width: int) -> Case:
    def run(x: Sequence[Tensor], mode: OperatorMode) -> tuple[Tensor, ...]:
        return (_AddBias.apply(x[0], x[1].detach(), mode),)

    shapes = ((width,), (tokens, width))
    num_bytes = 2 * tokens * width
    return Case("bias gradient", f"{tokens}x{width}", run, shapes, num_bytes, compiles=False)


def _heads(tokens: int, queries: int, groups: int, head_dim: int, *, rope: bool) -> Case:
    def run(x: Sequence[Tensor], mode: OperatorMode) -> tuple[Tensor, ...]:
        table = tables[x[0].dtype] if rope else None
        return heads(x[0], tokens, head_dim, queries // groups, table, mode)

    gpu = torch.device("cuda")
    tables = {
        dtype: rope_table(tokens, head_dim, 1e4, None, dtype, gpu) for dtype in (LOW, torch.double)
    }
    width = (queries + 2 * groups) * head_dim
    num_bytes = (8 if rope else 4) * tokens * width
    name = "heads, rotated" if rope else "heads"
    return Case(name, f"{tokens}x{width}", run, ((tokens, width),), num_bytes)


def _loss(tokens: int, vocabulary: int) -> Case:
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")

    masks = {LOW: torch.ones(tokens, device="cuda")}
    masks[torch.double] = masks[LOW].double()

    def run(x: Sequence[Tensor], mode: OperatorMode) -> tuple[Tensor, ...]:
        return (cross_entropy(x[0], labels, masks[x[0].dtype], mode=mode),)

    def torch_own(x: Sequence[Tensor], _mode: OperatorMode) -> tuple[Tensor, ...]:
        return (F.cross_entropy(x[0].float(), labels, reduction="sum"),)

    return Case(
        "cross-entropy",
        f"{tokens}x{vocabulary}",
        run,
        ((tokens, vocabulary),),
        6 * tokens * vocabulary,
        owned=True,
        compiled=torch_own,
    )


class Pass:
    """A forward and a backward pass of a case by one method."""

    def __init__(self, case: Case, tensors: Sequence[Tensor], method: str) -> None:
        mode: OperatorMode = "fused" if method == "fused" else "plain"
        self._case, self._tensors = case, tensors
        self._grads: list[Tensor] = []
        operator = case.operator
        if method == "compiled" and case.compiled is not None:
            operator = case.compiled

        def run(x: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return operator(x, mode)

        self._run = torch.compile(run, dynamic=False) if method == "compiled" else run

    def inputs(self) -> list[Tensor]:
        """Leaves for one pass."""
        first = self._tensors[0].clone() if self._case.owned else self._tensors[0].detach()
        rest = (x.detach() for x in self._tensors[1:])
        leaves = [x.requires_grad_() for x in (first, *rest)]
        for leaf in leaves:
            if leaf.dim() == 1:  # as a training step has it
                wide = torch.promote_types(leaf.dtype, torch.float32)
                leaf.main_grad = torch.zeros_like(leaf, dtype=wide)  # type: ignore[attr-defined]
        return leaves

    def __call__(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Results and gradients."""
        results = [y for y in self._run(leaves) if y.requires_grad]
        if not self._grads:
            generator = torch.Generator(device="cuda").manual_seed(2)
            for y in results:
                random = torch.randn(y.shape, device="cuda", generator=generator)
                random = random.to(LOW).to(y.dtype)  # the same for a pass in fp64
                self._grads.append(torch.ones_like(y) if y.dim() == 0 else random)
        torch.autograd.backward(results, self._grads)
        found = [y.detach() for y in results]
        for leaf in leaves:
            if leaf.grad is not None:  # plain operators return it: it is added as the owner does
                if leaf.dim() == 1:
                    leaf.main_grad.add_(leaf.grad)  # type: ignore[attr-defined]
                else:
                    found.append(leaf.grad)
            if leaf.dim() == 1:
                found.append(leaf.main_grad)  # type: ignore[attr-defined]
        return found


def check(case: Case, tensors: Sequence[Tensor]) -> float:
    """The largest relative error of the fused pass against the plain one in fp64."""
    fused = Pass(case, tensors, "fused")
    found = fused(fused.inputs())
    wide = Pass(case, [x.double() for x in tensors], "plain")
    wanted = wide(wide.inputs())
    assert len(found) == len(wanted), (case.name, len(found), len(wanted))
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    return max(errors)


def measure(case: Case, rounds: int, compiles: bool) -> dict[str, Any]:
    """A row without what all rows share. SystemExit where values are wrong."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    tensors = [
        torch.randn(shape, device="cuda", generator=generator).to(LOW) for shape in case.shapes
    ]
    error = check(case, tensors)
    if not error < MOST_ERROR:
        raise SystemExit(f"{case.name} {case.shape}: off by {error:.2e}; nothing is timed")
    torch.compiler.reset()  # one `run` for all cases: the ninth shape would not be compiled
    methods = ("fused", "plain", "compiled") if case.compiles and compiles else ("fused", "plain")
    passes = {method: Pass(case, tensors, method) for method in methods}
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    times: dict[str, list[float]] = {method: [] for method in (*passes, "copy")}
    for number in range(rounds + 3):
        elapsed = {"copy": _time(lambda: target.copy_(source))}
        for method, run in passes.items():
            leaves = run.inputs()
            elapsed[method] = _time(lambda run=run, leaves=leaves: run(leaves))  # type: ignore[misc]
        if number >= 3:
            for method, value in elapsed.items():
                times[method].append(value)
    medians = {method: statistics.median(values) for method, values in times.items()}
    rate = 8 * source.numel() / medians.pop("copy") / 1e6
    roof = case.num_bytes / rate / 1e6
    shown = "  ".join(f"{method} {value * 1e3:7.1f}" for method, value in medians.items())
    print(
        f"{case.name:22} {case.shape:12} us: {shown}  roof {roof * 1e3:6.1f} "
        f"= {roof / medians['fused']:4.0%}  off by {error:.0e}"
    )
    return {
        "bench": "operators",
        "case": {"operator": case.name, "shape": case.shape},
        "metric": "ms",
        "value": medians["fused"],
        "baselines": {name: medians[name] for name in methods[1:]} | {"roof": roof},
        "copy_gb_s": rate,
        "error": error,
        "stats": {"rounds": rounds, "min": min(times["fused"]), "max": max(times["fused"])},
    }


def _time(call: Callable[[], object]) -> float:
    """Milliseconds on the device, queued behind a kernel that waits until all is launched."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    """Print a line a case; append a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compiled", action="store_true", help="half of the program's time")
    arguments = parser.parse_args()
    shared = {
        "device": torch.cuda.get_device_name(),
        "num_devices": 1,
        "commit": arguments.commit,
        "dirty": not arguments.commit,
        "versions": installed_versions(("torch", "triton")),
        "command": f"python -m benchmarks.operators --rounds {arguments.rounds}",
    }
    for case in cases():
        row = measure(case, arguments.rounds, not arguments.no_compiled)
        row |= {**shared, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        if arguments.output:
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
