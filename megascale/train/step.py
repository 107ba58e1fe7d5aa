"""One optimizer step, without a host wait: everything that the loop reports stays on the device.

The loss is a mean over all unmasked tokens of the global batch. Micro-batches contribute sums over
a nominal token count; the true count is known when the last stage has seen all masks. One small sum
over the world then gives every rank the loss, the correction of the gradients, and whether anybody
asked to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.data import MicroBatch
from megascale.optim import StepResult
from megascale.train.assemble import Assembly


@dataclass(frozen=True)
class StepOutcome:
    """Device values of a step; reading one waits for the step.

    loss        mean loss over the unmasked tokens of the global batch, equal on all ranks
    num_valid   how many those were
    stop_votes  ranks that asked to stop before this step
    """

    loss: Tensor
    num_valid: Tensor
    stop_votes: Tensor
    update: StepResult


def train_step(
    assembly: Assembly,
    micro_batches: Sequence[MicroBatch],
    *,
    global_batch: int,
    lr: float,
    wants_stop: bool = False,
) -> StepOutcome:
    """Forward, backward, reduce, update. A non-finite norm masks the update on the device."""
    zero, program = assembly.zero, assembly.program
    nominal = global_batch * assembly.config.training.seq_len
    program.begin(micro_batches, nominal_tokens=nominal, training=True)
    zero.start_step()
    assembly.runtime.run(len(micro_batches))
    loss_sum, num_valid, votes = _world_sums(assembly, wants_stop)
    zero.finish_gradients()
    with assembly.span("optimizer"):
        update = assembly.optimizer.step(lr, grad_scale=nominal / num_valid.clamp(min=1.0))
    zero.gather_parameters()
    return StepOutcome(loss_sum / num_valid, num_valid, votes, update)


@torch.no_grad()
def validation_loss(assembly: Assembly, batches: Sequence[Sequence[MicroBatch]]) -> float:
    """Mean loss over all unmasked tokens of `batches` (global batches); waits for the device."""
    program = assembly.program
    total = torch.zeros(2, dtype=torch.float64, device=assembly.device)
    for micro_batches in batches:
        program.begin(micro_batches, nominal_tokens=1, training=False)
        assembly.runtime.run_forward(len(micro_batches))
        loss_sum, num_valid, _ = _world_sums(assembly, wants_stop=False)
        total += torch.stack([loss_sum, num_valid])
    loss_sum, num_valid = total.tolist()
    return float(loss_sum / max(num_valid, 1.0))


def _world_sums(assembly: Assembly, wants_stop: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss sum, valid tokens, votes to stop) over the world.

    Every tensor-parallel rank of the last stage holds the same loss; rank 0 of them counts it.
    """
    program, groups = assembly.program, assembly.groups
    counts = groups.is_last_stage and groups.coordinates.tp_rank == 0
    sums = torch.stack(
        [
            program.loss_sum * float(counts),
            program.num_valid * float(counts),
            torch.full_like(program.loss_sum, float(wants_stop)),
        ]
    )
    if assembly.mesh.world_size > 1:
        dist.all_reduce(sums)
    loss_sum, num_valid, votes = sums.unbind()
    return loss_sum, num_valid, votes
