"""What the papers do not state, chosen here once and by name, and what else it may be.

MegaScale states neither micro-batch, recomputation, window, gradient type nor the baseline's ZeRO
stage and attention kernel (MegaScale 6.1). A validation that hid such a choice would be fitted by
hand, so each is a field, the defaults are those of every figure, and `SWEPT` are the others for
which the errors are told too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megascale.plan.case import Recompute


@dataclass(frozen=True)
class Choices:
    """Free choices of the MegaScale rows.

    micro_batch_size  1: the only one of 1, 2, 4 that leaves the bubble as small as its text says
    recompute         nothing: with a flash kernel 80 GB hold it in every row
    window            tokens; 768 of 2048 is what the FLOPs of the printed MFU imply
    zero_stage        1 as this program counts: gradients are reduced once a step, chunk by chunk
                      (MegaScale 3.2 hides all but one of them); reducing them every micro-batch, as
                      stage 2 means here, would take three times as long as the step
    dropout           of hidden states, both systems: Megatron-LM's default; a flash kernel makes
                      attention's own on the way, which costs nothing here
    """

    micro_batch_size: int = 1
    recompute: Recompute = "none"
    window: int = 768
    zero_stage: Literal[1, 2] = 1
    dropout: float = 0.1


CHOSEN = Choices()
SWEPT: dict[str, Choices] = {
    "micro-batch 2": replace(CHOSEN, micro_batch_size=2),
    "micro-batch 4": replace(CHOSEN, micro_batch_size=4),
    "window 512": replace(CHOSEN, window=512),
    "window 1024": replace(CHOSEN, window=1024),
    "activations recomputed": replace(CHOSEN, recompute="selective"),
}
