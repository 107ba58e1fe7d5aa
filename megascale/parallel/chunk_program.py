"""What the pipeline runtime asks of the model: to compute a chunk for a micro-batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megascale.parallel.shared_head import SummedGradient


class ChunkProgram(Protocol):
    """Computes the chunks of one stage."""

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Local shape of the hidden states between chunks, the same for every micro-batch."""

    @property
    def hidden_dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> Tensor:
        """Hidden states after `chunk`; of the last chunk of all: the scalar loss, or with a shared
        head what the head reads.

        x  hidden states from the chunk before; None for chunk 0, which reads its own tokens
        """


class HeadProgram(ChunkProgram, Protocol):
    """With a part of a shared head."""

    def head(self, micro_batch: int, x: Tensor | None) -> tuple[Tensor, SummedGradient | None]:
        """The scalar loss, and where gradients are enabled, that of `x`, backward being done.

        x  what the last chunk returned; None on other stages
        """
