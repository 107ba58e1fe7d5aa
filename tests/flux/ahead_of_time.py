"""Compiles kernels for GPUs that are not there and shows their PTX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TARGETS = (80, 90)
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Any:
    """`kernel` as Triton's CompiledKernel: `asm`, `metadata`.

    types      by argument, as Triton's signatures name them ("*bf16", "i32"); a trailing ":16" says
               that 16 divides the value, which the launcher finds out at run time
    constants  of the constexpr arguments; of pointers that are None too
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    missing = set(names) - set(types) - set(constants)
    unknown = (set(types) | set(constants)) - set(names)
    assert not missing, missing
    assert not unknown, unknown
    signature = {n: "constexpr" if n in constants else types[n].removesuffix(":16") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n in types and types[n].endswith(":16")
    }
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )


def compiled_gluon(
    kernel: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any], *, num_warps: int = 8
) -> Any:
    """A Hopper kernel as a launch with these would compile it, tensors at multiples of 16 bytes.

    arguments, constants  together the kernel's, in its order
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    assert [*arguments, *constants] == names
    types, attributes = {}, {}
    for i, name in enumerate(names):
        value: Any = arguments.get(name)
        if name in constants:
            types[name] = "constexpr"
        elif isinstance(value, Tensor):
            types[name] = f"*{NAMES[value.dtype]}"
        elif isinstance(value, int):
            types[name] = "i32"
        else:
            kind = NAMES[value.base.dtype]
            types[name] = f"tensordesc<{kind}{list(value.block_shape)},{value.layout!r}>"
        divides = isinstance(value, int) and value % 16 == 0 and name != "rank"
        if isinstance(value, Tensor) or divides:
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, types, values, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
    )


def ptx(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> str:
    """PTX of `kernel`; arguments as for `compiled`."""
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return str(compiled(kernel, types, constants, capability, **options).asm["ptx"])
