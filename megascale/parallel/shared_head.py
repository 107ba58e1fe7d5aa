"""An output head whose vocabulary is split over pipeline stages (2411.05288) and tensor ranks.

The head costs 6 h V FLOPs a token: 0.42 of a layer of h 12288 with V 64000. On the last stage alone
it makes that stage the slowest, and all others wait for it. Here rank (stage, tensor rank) stores
the rows of part `stage * tensor + tensor rank` and every stage computes its share.

What travels for each micro-batch, t own token rows of a tensor rank, T all of them:
1. hidden states behind the final norm, [t, h], broadcast from the last stage over the pipeline;
2. in each stage, the gather of rows over tensor ranks that a column-parallel linear does anyway;
3. softmax statistics, [T] and [2, T] in the main dtype, summed over stages and tensor ranks
   (`cross_entropy.py`, whose group spans both here);
4. gradients of the hidden states, [t, h], summed to the last stage, under the head's own weight
   gradient, which is deferred for that (`ops/deferred.py`) and may be joined over micro-batches.
Forward and backward are one action (HEAD): the loss's gradient needs nothing but the loss's scale,
so no logits are kept from a forward to a backward, on any stage.

When: HEAD stands at the same place in every stage's list, right behind the last chunk's forward on
the last stage (`plan/schedules/shared_head.py`, with what it costs). It needs an interleaved
schedule. Where the paper cuts the head in two passes to hide the exchange of statistics, one
exchange of 3 numbers a token is waited for here: on NVLink it is microseconds.

No deadlock: steps 1 and 4 and the statistics have communicators of their own, which carry nothing
else; every rank meets them in the order of micro-batches; transfers between stages are posted
before and complete beside them. The checker simulates HEAD as a meeting of all stages.

Loss: every rank gets the whole one. Data parallelism sees the rows as one more chunk with one unit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.parallel.cross_entropy import LossFunction
from megascale.parallel.spans import Span, no_span


class SummedGradient:
    """The gradient of the hidden states, on its way to the last stage."""

    def __init__(self, gradient: Tensor, work: dist.Work | None) -> None:
        self._gradient, self._work = gradient, work

    def wait(self) -> Tensor:
        """On the last stage the sum (on CUDA: for the current stream); elsewhere of no use."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._gradient


class SharedHead:
    """This rank's rows of the head, and the loss.

    logits  hidden states [t, h] to logits of the own rows [T, v]
    loss    the loss over all rows, which meets the other stages' ranks
    group   the stages' ranks that have the same tensor and data rank, in order of stages
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        loss: LossFunction,
        group: dist.ProcessGroup,
        *,
        span: Span = no_span,
    ) -> None:
        self.logits, self.loss, self._group, self._span = logits, loss, group, span
        self._last = group.size() - 1
        self.is_last_stage = dist.get_rank(group) == self._last

    def receive(
        self,
        hidden_tD: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """The last stage's hidden states, on all stages; `hidden_tD` is given there alone."""
        assert (hidden_tD is not None) == self.is_last_stage
        if hidden_tD is None:
            received = torch.empty(shape, dtype=dtype, device=device)
        else:
            received = hidden_tD.contiguous()
        assert tuple(received.shape) == shape, (received.shape, shape)
        with self._span("head_input", op="broadcast", group="head", work="pp"):
            dist.broadcast(received, group_src=self._last, group=self._group)
        return received

    def loss_sum(self, hidden_tD: Tensor, labels_T: Tensor, mask_T: Tensor) -> Tensor:
        """The sum of the masked losses, with gradients of hidden states and own rows."""
        return self.loss(self.logits(hidden_tD), labels_T, mask_T)

    def sum_gradient(self, gradient_tD: Tensor) -> SummedGradient:
        """Begin to sum what all stages found to the last one; `gradient_tD` is used up."""
        gradient_tD = gradient_tD.contiguous()
        with self._span("head_gradient", op="reduce", group="head", work="pp"):
            work = dist.reduce(gradient_tD, group_dst=self._last, group=self._group, async_op=True)
        return SummedGradient(gradient_tD, work)


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make NCCL build the communicator now and not inside a step."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
