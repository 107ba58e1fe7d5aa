"""Tensor-parallel communication and its GEMM as one operator (Flux; MegaScale 3.2).

One folder an operator: `reference.py` is the plain form (a collective, then the GEMM) that runs on
any backend and defines the result. Fused forms join it in the same folder and share its signature.
"""

from megascale.flux.all_gather_gemm.reference import all_gather_gemm
from megascale.flux.collectives import all_gather, reduce_scatter
from megascale.flux.gemm_reduce_scatter.reference import gemm_reduce_scatter
from megascale.flux.mode import FluxMode, choose_mode

__all__ = [
    "FluxMode",
    "all_gather",
    "all_gather_gemm",
    "choose_mode",
    "gemm_reduce_scatter",
    "reduce_scatter",
]
