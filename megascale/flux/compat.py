"""`AGKernel` and `GemmRS` for programs written for bytedance/flux 1.1: change the import, run.

They have the constructor and `forward` of those classes, over our operators. What has no meaning
here is refused with the way to get the same: nothing is accepted and then ignored. Differences:

| bytedance/flux | here |
|---|---|
| buffers of `full_m`, `max_m` rows, made by the constructor | symmetric memory shared by all operators of the group, made at first use; the bound is still checked |
| options of the transfer (`AllGatherOption`, `ReduceScatterOption`, `ring_reduction`) | the tuner chooses: `AllGatherGemm(group, tune="now")` |
| fp8, int8 with scales | bf16, fp16; in reference form any type that torch multiplies |
| `GemmRS` adds every rank's bias before the sum | `GemmReduceScatter` adds one bias after it |
| world sizes that divide m, n, k | any m |
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.operators import AllGatherGemm, GemmReduceScatter
from megascale.flux.problem import whole_number

_TUNER = 'the tuner chooses; leave it out, or measure with AllGatherGemm(group, tune="now")'


class AGKernel:
    """All-gather + GEMM. `settings` are those of `AllGatherGemm` (mode, tune, ...)."""

    def __init__(
        self,
        tp_group: dist.ProcessGroup,
        nnodes: int,
        full_m: int,
        n_dim: int,
        k_dim: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
        use_pdl: bool = False,
        **settings: Any,
    ) -> None:
        _one_node(nnodes)
        _same_dtype(input_dtype, output_dtype)
        _refuse("use_pdl", use_pdl, "one kernel runs here, which follows no other; leave it out")
        self._sizes = _sizes(full_m=full_m, n_dim=n_dim, k_dim=k_dim)
        self._dtype = input_dtype
        self._operator = AllGatherGemm(tp_group, **settings)

    def forward(
        self,
        input: Tensor,  # noqa: A002 - the name there
        weight: Tensor,
        bias: Tensor | None = None,
        output: Tensor | None = None,
        input_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
        output_scale: Tensor | None = None,
        fast_accum: bool = False,
        transpose_weight: bool = False,
        all_gather_option: Any = None,
        gathered_input: Tensor | None = None,
    ) -> Tensor:
        """[m, n] of the shard `input` [m / W, k].

        weight          [n, k], or [k, n] with `transpose_weight`
        bias            [n] or [1, n]
        output, gathered_input   where given, a copy goes there (a pass over it more)
        Raises FluxError before anything is launched.
        """
        full_m, n, k = self._sizes
        world_size = self._operator.world_size
        with _telling(self._operator):
            _refuse_scales(input_scale, weight_scale, output_scale, fast_accum)
            _refuse("all_gather_option", all_gather_option, _TUNER)
            _at_most("input", input, self._dtype, full_m // world_size, "full_m / W")
            _exactly("input", input, 1, k, "k_dim")
            _exactly("weight", weight, 1 if transpose_weight else 0, n, "n_dim")
            m = input.shape[0] * world_size
            _fits("output", output, self._dtype, (m, n))
            _fits("gathered_input", gathered_input, self._dtype, (m, k))
            bias = _row(bias, n)
        found = self._operator(
            input,
            weight,
            bias,
            weight_layout="KN" if transpose_weight else "NK",
            return_gathered=gathered_input is not None,
        )
        if gathered_input is None:
            y: Tensor = found
        else:
            y, x_TK = found
            gathered_input.copy_(x_TK)
        return y if output is None else output.copy_(y)

    def gemm_only(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _gone("gemm_only", "use torch.nn.functional.linear")

    def profiling(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _gone("profiling", 'make AllGatherGemm(group, tune="now")')


class GemmRS:
    """GEMM + reduce-scatter. `settings` are those of `GemmReduceScatter` (mode, tune, ...)."""

    def __init__(
        self,
        tp_group: dist.ProcessGroup,
        nnodes: int,
        max_m: int,
        n_dim: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
        transpose_weight: bool = False,
        fuse_reduction: bool = False,
        ring_reduction: bool = False,
        **settings: Any,
    ) -> None:
        _one_node(nnodes)
        _same_dtype(input_dtype, output_dtype)
        _refuse(
            "fuse_reduction",
            fuse_reduction,
            "sums here are in rank order in fp32; leave it out, or give in_flight=True, which adds "
            "at the owner and is repeatable too",
        )
        _refuse("ring_reduction", ring_reduction, _TUNER)
        self._sizes = _sizes(max_m=max_m, n_dim=n_dim)
        self._dtype = input_dtype
        self._layout = "KN" if transpose_weight else "NK"
        self._operator = GemmReduceScatter(tp_group, **settings)

    def forward(
        self,
        input: Tensor,  # noqa: A002 - the name there
        weight: Tensor,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
        output_scale: Tensor | None = None,
        fast_accum: bool = False,
        reduce_scatter_option: Any = None,
    ) -> Tensor:
        """[m / W, n] of `input` [m, k of this rank]; FluxError before anything is launched."""
        max_m, n = self._sizes
        with _telling(self._operator):
            _refuse_scales(input_scale, weight_scale, output_scale, fast_accum)
            _refuse("reduce_scatter_option", reduce_scatter_option, _TUNER)
            _refuse(
                "bias",
                bias,
                "there every rank's bias is added before the sum; add their sum to the result, or "
                "use GemmReduceScatter, which adds one bias once",
            )
            _at_most("input", input, self._dtype, max_m, "max_m")
            _exactly("weight", weight, 0 if self._layout == "NK" else 1, n, "n_dim")
        return self._operator(input, weight, weight_layout=self._layout)

    def forward_barrier(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _gone("forward_barrier", "forward is complete in itself")

    def forward_reduce_scatter(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _gone("forward_reduce_scatter", "call forward, or megascale.flux.reduce_scatter")

    def zero_buffers(self) -> NoReturn:
        _gone("zero_buffers", "no buffer here has to be zero; leave the call out")

    def profiling(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _gone("profiling", 'make GemmReduceScatter(group, tune="now")')


@contextmanager
def _telling(operator: AllGatherGemm | GemmReduceScatter) -> Iterator[None]:
    """In debug mode the peers hear of a refusal inside."""
    try:
        yield
    except FluxError as error:
        operator.refused(error)
        raise


def _sizes(**sizes: Any) -> tuple[int, ...]:
    return tuple(whole_number(name, value) for name, value in sizes.items())


def _gone(name: str, instead: str) -> NoReturn:
    raise FluxError(f"{name} does not exist here; {instead}")


def _refuse(name: str, value: Any, instead: str) -> None:
    if value is not None and value is not False:
        got = "given" if isinstance(value, Tensor) else repr(value)
        raise FluxError(f"{name} is {got}, which has no meaning here: {instead}")


def _refuse_scales(
    input_scale: Any, weight_scale: Any, output_scale: Any, fast_accum: bool
) -> None:
    for name, value in (
        ("input_scale", input_scale),
        ("weight_scale", weight_scale),
        ("output_scale", output_scale),
        ("fast_accum", fast_accum),
    ):
        _refuse(name, value, "fp8 and int8 are not supported; use bf16 or fp16")


def _one_node(nnodes: int) -> None:
    if nnodes != 1:
        raise FluxError(
            f"nnodes is {nnodes}; these operators work inside one node: give a group of its ranks"
        )


def _same_dtype(input_dtype: torch.dtype, output_dtype: torch.dtype | None) -> None:
    if output_dtype not in (None, input_dtype):
        raise FluxError(
            f"output_dtype is {output_dtype} and input_dtype {input_dtype}; results have the type "
            "of the input: convert them"
        )


def _tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise FluxError(f"{name} is {value!r}; it must be a tensor")


def _at_most(name: str, x: Tensor, dtype: torch.dtype, most: int, limit: str) -> None:
    _tensor(name, x)
    if x.dim() != 2:
        raise FluxError(f"{name} is {list(x.shape)}; it must have two dimensions")
    if x.dtype != dtype:
        raise FluxError(f"{name} is {x.dtype} and input_dtype was {dtype}; give both the same")
    if x.shape[0] > most:
        raise FluxError(
            f"{name} has {x.shape[0]} rows and {limit} was {most}; make a kernel for as many"
        )


def _exactly(name: str, tensor: Tensor, dim: int, size: int, limit: str) -> None:
    _tensor(name, tensor)
    if tensor.dim() == 2 and tensor.shape[dim] != size:  # other tensors the operator refuses
        raise FluxError(
            f"{name} is {list(tensor.shape)} and {limit} was {size}; dimension {dim} must be that, "
            "or make a kernel for this size"
        )


def _fits(name: str, out: Tensor | None, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if out is not None:
        _tensor(name, out)
    if out is not None and (tuple(out.shape) != shape or out.dtype != dtype):
        raise FluxError(
            f"{name} is {out.dtype} {list(out.shape)}; it must be {dtype} {list(shape)}"
        )


def _row(bias: Tensor | None, n: int) -> Tensor | None:
    """A bias [n] of one that has the form [1, n]."""
    if bias is not None:
        _tensor("bias", bias)
    if bias is not None and tuple(bias.shape) not in ((n,), (1, n)):
        raise FluxError(
            f"bias is {list(bias.shape)}; it must be [{n}] or [1, {n}]: add one with a row for "
            "each row of the result to the result"
        )
    return None if bias is None else bias.reshape(n)
