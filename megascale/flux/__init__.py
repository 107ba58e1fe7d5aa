"""Tensor-parallel communication and its GEMM as one operator (Flux; MegaScale 3.2).

In a program of your own:

    gather = AllGatherGemm(group)        # or GemmReduceScatter, GemmAllReduce
    y_TN = gather(x_tK, weight_NK)       # values; `column_parallel_linear` has gradients too

One folder an operator, a file a form; `reference.py` is the plain one (a collective, then the GEMM)
that runs on any backend and defines the result. `operators.py` says which form runs when. Importing
this needs neither triton nor a GPU.
"""

from megascale.flux.all_gather_gemm.reference import all_gather_gemm
from megascale.flux.autograd import (
    TensorOps,
    column_parallel_linear,
    row_parallel_linear,
    row_parallel_pair,
)
from megascale.flux.collectives import all_gather, reduce_scatter
from megascale.flux.gemm_reduce_scatter.reference import gemm_reduce_scatter
from megascale.flux.machine import why_not_fused
from megascale.flux.mode import FluxChoice, FluxMode, choose_mode
from megascale.flux.operators import AllGatherGemm, GemmAllReduce, GemmReduceScatter

__all__ = [
    "AllGatherGemm",
    "FluxChoice",
    "FluxMode",
    "GemmAllReduce",
    "GemmReduceScatter",
    "TensorOps",
    "all_gather",
    "all_gather_gemm",
    "choose_mode",
    "column_parallel_linear",
    "gemm_reduce_scatter",
    "reduce_scatter",
    "row_parallel_linear",
    "row_parallel_pair",
    "why_not_fused",
]
