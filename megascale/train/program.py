"""What a pipeline stage computes for one micro-batch: its chunks, and the loss behind the last.

The runtime decides when a chunk runs; this module knows what a chunk needs: tokens for the first,
labels for the last, positions and sample numbers for all. Every pipeline stage reads the same
micro-batches (they are a pure function of sample numbers), so no stage waits for another's labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config import RunConfig
from megascale.model.context import ForwardContext
from megascale.model.transformer import TransformerChunk
from megascale.parallel.cross_entropy import LossFunction
from megascale.parallel.groups import Groups
from megascale.parallel.shared_head import SharedHead, SummedGradient


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device, flattened batch-major to T tokens, and its context."""

    tokens_T: Tensor
    labels_T: Tensor
    mask_T: Tensor  # main dtype, 1 where the token counts
    context: ForwardContext


class StageProgram:
    """The chunks of this stage by global chunk number, run for the runtime.

    Losses are summed over tokens and scaled by 1 / (tokens of the nominal global batch), a constant
    of the step: `loss_sum` and `num_valid` collect what the true mean needs. The step divides by
    the true global count of unmasked tokens at the end, in one device scalar.

    shared_head  this rank's part of a head that stages share; the last chunk then ends before it
    """

    def __init__(
        self,
        config: RunConfig,
        groups: Groups,
        chunks: Mapping[int, TransformerChunk],
        loss: LossFunction,
        *,
        device: torch.device,
        main_dtype: torch.dtype,
        shared_head: SharedHead | None = None,
    ) -> None:
        self.config = config
        self.shared_head = shared_head
        self.groups = groups
        self.chunks = chunks
        self.loss = loss
        self.device = device
        self.main_dtype = main_dtype
        self.last_chunk = config.parallelism.num_chunks - 1
        self.batches: Sequence[DeviceBatch] = ()
        self.nominal_tokens = 1.0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_valid = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """[t, D]: this rank's token rows between chunks."""
        training = self.config.training
        tokens = training.micro_batch_size * training.seq_len
        return tokens // self.groups.mesh.tensor, self.config.model.hidden_size

    @property
    def hidden_dtype(self) -> torch.dtype:
        parameter = next(next(iter(self.chunks.values())).parameters())
        return parameter.dtype

    def begin(self, batches: Sequence[DeviceBatch], *, nominal_tokens: int) -> None:
        """Take the micro-batches of one step (`batches.py` prepares them) and reset the loss."""
        self.batches = batches
        self.nominal_tokens = float(nominal_tokens)
        self.loss_sum.zero_()
        self.num_valid.zero_()

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> Tensor:
        """Hidden states of `chunk` for a micro-batch; the scaled loss behind the last chunk, unless
        the head is shared."""
        batch = self.batches[micro_batch]
        inputs = batch.tokens_T if x is None else x
        output: Tensor = self.chunks[chunk](inputs, batch.context)
        if chunk != self.last_chunk or self.shared_head is not None:
            return output
        return self._scaled(self.loss(output, batch.labels_T, batch.mask_T), batch)

    def head(self, micro_batch: int, x: Tensor | None) -> tuple[Tensor, SummedGradient | None]:
        """The scaled loss and the gradient of the last chunk's output, which is `x` there."""
        head, batch = self.shared_head, self.batches[micro_batch]
        assert head is not None
        x = head.receive(x, self.hidden_shape, self.hidden_dtype, self.device)
        x.requires_grad_(torch.is_grad_enabled())
        loss = self._scaled(head.loss_sum(x, batch.labels_T, batch.mask_T), batch)
        if not torch.is_grad_enabled():
            return loss, None
        loss.backward()
        assert x.grad is not None
        return loss, head.sum_gradient(x.grad)

    def _scaled(self, loss_sum: Tensor, batch: DeviceBatch) -> Tensor:
        self.loss_sum += loss_sum.detach()
        self.num_valid += batch.mask_T.sum()
        return loss_sum / self.nominal_tokens
