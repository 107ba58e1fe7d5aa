"""The operators that a user calls: all-gather + GEMM, GEMM + reduce-scatter, GEMM + all-reduce.

    gather = AllGatherGemm(group)                  # once
    y_TN = gather(x_tK, weight_NK, bias_N)         # every call

A call refuses wrong arguments (`problem.check`), takes a form (`selection.py`) and runs it
(`group_operator.py`). Each operator is the `operator.py` of its folder.

| mode | runs | where it cannot |
|---|---|---|
| auto | what was measured as the fastest, else the default rule | the reference, logged once |
| fused | one kernel for communication and GEMM | FluxError with the reason |
| chunked | cuBLAS on chunks beside copy engines | FluxError with the reason |
| reference | the backend's collective, then the GEMM | |

One rank (group None, or of one rank) is a plain GEMM in every mode.

**Contract.** All ranks of the group make the same calls in the same order, with equal m, n, k, type
and `weight_layout`, by operators of equal settings (but for the file of choices); a weight is
contiguous and 16-byte aligned on all of them or on none. Forms are chosen by these: ranks that
differ may take different forms and wait for ever. Local checks precede every launch, but a rank
sees its own rows and arguments only, so it may refuse what its peers take (of 4 rows on each of two
ranks and num_rows=9 only rank 0 sees that a row is missing). `deadline_s` is for that
(`deadline.py`): all ranks then hear who differs or has refused. The current device is x's.

The first call of a group is collective beyond its own operation (machine facts, tuning cache,
symmetric memory) and may not be captured into a CUDA graph; later ones may.

These compute values, not gradients, and refuse tensors that ask for them: a result without history
would end a backward pass silently. `autograd.py` has the differentiable linears.

Cost on the host: about 6 us a call beside the form's own.

Legend: T rows of all ranks (m), t rows of this rank (c = ceil(m / W), the last ranks fewer or
none), K reduction, N output columns of this rank.
"""

from megascale.flux.all_gather_gemm.operator import AllGatherGemm
from megascale.flux.gemm_all_reduce.operator import GemmAllReduce
from megascale.flux.gemm_reduce_scatter.operator import GemmReduceScatter

__all__ = ["AllGatherGemm", "GemmAllReduce", "GemmReduceScatter"]
