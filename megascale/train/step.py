"""One optimizer step, without a host wait: everything that the loop reports stays on the device.

The loss is a mean over all unmasked tokens of the global batch. Micro-batches contribute sums over
a nominal token count; the true count is known when the last stage has seen all masks. One small sum
over the world then gives every rank the loss, the correction of the gradients, whether anybody
asked to stop, and which tiers' time the writer found to be up (`tiers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.data import MicroBatch
from megascale.optim import StepResult
from megascale.train.assemble import Assembly
from megascale.train.batches import on_device
from megascale.train.host import Moment
from megascale.train.program import DeviceBatch

Batches = Sequence[MicroBatch] | Sequence[DeviceBatch]


class HostCopy:
    """Small device values on their way to the host.

    The copy is queued right behind what computes the values, and reading waits for it alone.
    `item()` would queue a copy behind everything launched since, the next step included.
    """

    def __init__(self, values: Tensor) -> None:
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        else:
            self._values = values.clone()
        self.moment = Moment(values.device)  # when they are there

    def read(self) -> list[float]:
        self.moment.wait()
        values: list[float] = self._values.tolist()
        return values


@dataclass(frozen=True)
class StepOutcome:
    """What a step leaves behind.

    summary  on its way to the host: mean loss over the unmasked tokens of the global batch, global
             gradient norm, 1 where the update was masked, ranks that asked to stop before the
             step, and the sum of the ranks' votes for tiers; equal on all ranks
    update   device values, for naming a parameter whose gradient is not finite
    """

    summary: HostCopy
    update: StepResult


def train_step(
    assembly: Assembly,
    batches: Batches,
    *,
    global_batch: int,
    lr: float,
    wants_stop: bool = False,
    vote: int = 0,
    after_backward: Callable[[], None] | None = None,
    before_update: Callable[[], None] | None = None,
) -> StepOutcome:
    """Forward, backward, reduce, update. A non-finite norm masks the update on the device.

    batches         micro-batches of the host, or prepared
    after_backward  called when backward was issued and gradients are being reduced
    before_update   called before anything of masters, moments and their count is changed: whoever
                    still copies the step before makes the stream wait
    """
    zero, program = assembly.zero, assembly.program
    nominal = global_batch * assembly.config.training.seq_len
    program.begin(_prepared(assembly, batches, training=True), nominal_tokens=nominal)
    zero.start_step()
    assembly.runtime.run(len(batches))
    sums = _start_world_sums(assembly, wants_stop, vote)
    if after_backward is not None:
        after_backward()

    def final(flat: int) -> None:
        with assembly.span("grad_norm", work="optimizer"):  # while others are being reduced
            assembly.optimizer.gradient_is_final(flat)

    zero.finish_gradients(final)
    loss_sum, num_valid, stops, votes = sums()
    if before_update is not None:
        before_update()
    with assembly.span("optimizer"):
        update = assembly.optimizer.step(
            lr,
            grad_scale=nominal / num_valid.clamp(min=1.0),
            updated=zero.flat_updated,
        )
    zero.finish_update()
    loss = loss_sum / num_valid.clamp(min=1.0)  # a batch that is masked whole has loss 0
    summary = torch.stack([loss, update.norm, update.found_inf.double(), stops, votes])
    return StepOutcome(HostCopy(summary), update)


@torch.no_grad()
def validation_loss(assembly: Assembly, steps: Iterable[Batches]) -> float:
    """Mean loss over all unmasked tokens of `steps` (global batches); waits for the device."""
    program = assembly.program
    total = torch.zeros(2, dtype=torch.float64, device=assembly.device)
    for batches in steps:
        program.begin(_prepared(assembly, batches, training=False), nominal_tokens=1)
        assembly.runtime.run_forward(len(batches))
        loss_sum, num_valid, *_ = _start_world_sums(assembly, wants_stop=False)()
        total += torch.stack([loss_sum, num_valid])
    loss_sum, num_valid = total.tolist()
    return float(loss_sum / max(num_valid, 1.0))


def _prepared(assembly: Assembly, batches: Batches, *, training: bool) -> Sequence[DeviceBatch]:
    if isinstance(batches[0], DeviceBatch):
        return cast(Sequence[DeviceBatch], batches)
    return on_device(assembly.program, cast(Sequence[MicroBatch], batches), training=training)


def _start_world_sums(
    assembly: Assembly, wants_stop: bool, vote: int = 0
) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to sum over the world; what it returns waits (on CUDA: the stream does) and gives loss
    sum, valid tokens, votes to stop, votes for tiers.

    Every tensor-parallel rank of the last stage holds the same loss; rank 0 of them counts it.
    """
    program, groups = assembly.program, assembly.groups
    counts = groups.is_last_stage and groups.coordinates.tp_rank == 0
    sums = torch.stack(
        [
            program.loss_sum * float(counts),
            program.num_valid * float(counts),
            torch.full_like(program.loss_sum, float(wants_stop)),
            torch.full_like(program.loss_sum, float(vote)),
        ]
    )
    work: dist.Work | None = None
    if assembly.mesh.world_size > 1:
        with assembly.span("world_sums", op="all_reduce", group="world"):
            work = dist.all_reduce(sums, async_op=True)

    def finish() -> tuple[Tensor, ...]:
        if work is not None:
            with assembly.span("world_sums", op="wait"):
                work.wait()
        return sums.unbind()

    return finish
