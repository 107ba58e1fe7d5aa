"""Which forms of the tensor-parallel operators a training run may use, and why.

The configuration asks (`parallelism.flux`), the run's layout and machine answer. The answer is
explicit: it is logged once with its reason, and what cannot be had is refused, except under "auto".

**Where kernels may not spin.** A fused kernel fills the GPU and waits, inside, for tiles of its
peers. With pipeline or data parallelism NCCL transfers are pending at the same time, on streams of
their own. Two ways to a deadlock, both with nobody at fault:

- Pipeline. Stage 0 has queued the send of an activation and runs a fused kernel that waits for a
  peer; the peer waits for a gradient from stage 1. Stage 1 has queued that send and runs a fused
  kernel that waits for a peer, which waits for the activation. The kernels hold the SMs that both
  sends need.
- Data. On two ranks an NCCL kernel came first and a part of the fused grid finds no SM; on their
  partners the fused kernel came first and the NCCL kernel finds none. Each waits for the other.

So there "auto" takes forms in which nothing that waits fills the GPU: "chunked" (transfers by copy
engines, waits in a kernel of one program or in the stream itself) or the backend's collective.
Reserving SMs breaks both cycles: fused grids are smaller by `reserve_sms` SMs, NCCL's kernels
always find a place, and whatever waits for them ends. That holds only where the reserve is at least
the thread blocks of all NCCL kernels that can run at once (`NCCL_MAX_CTAS` each; in a stage of a
pipeline up to four transfers and one collective of the data ranks), which nobody here can count: so
it is the user's word (`parallelism.flux_reserve_sms`), without which "fused" is refused.

With tensor parallelism alone every NCCL call of a step (embedding, loss, norms) is waited for on
the compute stream before the next operator is launched, so none is ever pending beside a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale.errors import ConfigError

FluxMode = Literal["auto", "fused", "chunked", "reference"]


@dataclass(frozen=True)
class FluxChoice:
    """What to hand to the operators.

    spin  kernels that fill the GPU may wait for peers
    """

    mode: FluxMode
    spin: bool
    reason: str

    def __str__(self) -> str:
        form = self.mode if self.spin else "chunked"
        return f"{form} ({self.reason})"


def choose_mode(
    asked: FluxMode,
    *,
    obstacle: str | None,
    nccl_beside: bool = False,
    reserve_sms: int = 0,
) -> FluxChoice:
    """Resolve `parallelism.flux`. Pure: equal on all ranks where its arguments are.

    obstacle     why this group cannot run kernels (`machine.why_not_fused`); None where it can
    nccl_beside  NCCL transfers may be pending while an operator runs: pipeline or data parallelism
    Raises ConfigError where what was asked for cannot be had.
    """
    if asked == "reference":
        return FluxChoice("reference", True, "asked for")
    if obstacle is not None:
        if asked == "auto":
            return FluxChoice("reference", True, obstacle)
        raise ConfigError(
            f'parallelism.flux is "{asked}", and {obstacle}; use "auto", which takes the reference '
            "here"
        )
    unsafe = nccl_beside and reserve_sms == 0
    if asked == "auto":
        if unsafe:
            return FluxChoice("auto", False, "NCCL transfers may be pending beside a kernel")
        return FluxChoice("auto", True, "the fastest for each shape")
    if asked == "fused" and unsafe:
        raise ConfigError(
            'parallelism.flux is "fused" with pipeline or data parallelism, whose NCCL transfers '
            "starve beside a kernel that fills the GPU and waits; set "
            "parallelism.flux_reserve_sms to the thread blocks of all NCCL kernels that run at "
            'once (NCCL_MAX_CTAS each), or use "auto"'
        )
    return FluxChoice(asked, not unsafe, "asked for")
