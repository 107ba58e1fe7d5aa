"""What the measured systems do with communication and operators, as `Software`.

megatron-2021       Narayanan et al. (2104.04473): all-reduces, everything recomputed, scores in
                    memory, gradients all-reduced after the backward, paired transfers
megatron-full       Korthikanti et al. (2205.05198), their baseline: the same
megatron-selective  the same paper's own: sequence parallel, the attention core recomputed
megatron-lm         commit 285068c8, MegaScale's baseline (MegaScale 6.1): interleaved 1F1B,
                    sequence parallel, distributed optimizer, nothing of data or pipeline
                    overlapped; its FlashAttention (the first) on, as only then a window saves time,
                    which Table 3 shows that it did
megascale           every technique of MegaScale 3
fsdp                PyTorch FSDP (MosaicML): parameters gathered under the forward, gradients
                    scattered under the backward, one flash kernel for attention

Megatron-LM of 2022 and later runs the collectives of the backward beside the other matrix product
(`tensor_overlap = "backward"`), those of the forward alone; before, all of them alone.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from megascale.plan.case import Software

_MEGATRON_2021 = Software(
    sequence_parallel=False,
    tensor_overlap="none",
    transfers="coupled",
    synchronises=True,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    grad_reduce_bytes=2,
    bucket_mb=inf,
    operators="fused",
    attention="scores",
    keeps_masks=True,
    host_ahead=False,
)
_MEGATRON_2022 = replace(_MEGATRON_2021, tensor_overlap="backward", grad_reduce_bytes=4)
_MEGATRON_SP = replace(_MEGATRON_2022, sequence_parallel=True)

SYSTEMS: dict[str, Software] = {
    "megatron-2021": _MEGATRON_2021,
    "megatron-full": _MEGATRON_2022,
    "megatron-selective": _MEGATRON_SP,
    "megatron-lm": replace(_MEGATRON_SP, attention="flash", operators="plain", grad_reduce_bytes=2),
    "megascale": Software(tensor_overlap="chunked", grad_reduce_bytes=2),
    "fsdp": Software(tensor_overlap="none", grad_reduce_bytes=2, operators="plain"),
}
