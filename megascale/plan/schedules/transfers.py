"""Insert sends and receives into a compute order: decoupled (MegaScale 3.2) or coupled.

Decoupled: every transfer stands alone. A send is posted right after the compute that made its
value; a receive is posted `PREFETCH_COMPUTES` computes before its consumer, weights' halves not
counted. So before a backward of the steady phase the receive that is posted feeds the next forward,
and transfers run beside computation in every phase (MegaScale Figure 4). A weights' half hides
nothing to rely on: where weight gradients are joined over K micro-batches, one in K does any work.

Coupled: what is sent after a round and what is received for the next are posted together, and the
stage waits for all of them, as a batch of paired sends and receives does. The slowest of them
delays the next compute: the baseline of the ablation.

Invariant: receives are posted in the order of their consumers and sends in the order of their
producers; `plan/check.py` proves that the two orders agree on each channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from megascale.plan.actions import INPUT_GRADIENTS, Action, ActionKind, PipelineShape
from megascale.plan.schedules.rounds import Round

PREFETCH_COMPUTES = 1

SEND_WINDOW = 2
"""Most sends of a channel in flight: before another, the stage waits for the oldest.

The bound is on memory: on a GPU the host runs a whole step ahead of the device, so "free what has
been sent" would free nothing until the step's end. It costs no time: a stage that is two sends
ahead of its neighbour waits for it soon anyway (by simulation, 1 to 8 stages, jitter of 30 %, a
window of 2 gives the step time of an unlimited one for every schedule but interleaved_zb on 7 and 8
stages, where it costs up to 2 computes a step, 1.4 % of the smallest).
"""


def decoupled(shape: PipelineShape, rounds: Sequence[Round]) -> list[Action]:
    computes = [compute for round_ in rounds for compute in round_]
    actions: list[Action] = []
    hiding = [compute for compute in computes if compute.kind is not ActionKind.BACKWARD_WEIGHT]
    horizon, posted = PREFETCH_COMPUTES, 0
    for compute in computes:
        horizon += compute.kind is not ActionKind.BACKWARD_WEIGHT
        for ahead in hiding[posted:horizon]:
            actions += receives_for(shape, ahead)
        posted = horizon
        actions.append(compute)
        actions += sends_of(shape, compute)
    return actions


def coupled(shape: PipelineShape, rounds: Sequence[Round]) -> list[Action]:
    actions: list[Action] = []
    for i, round_ in enumerate(rounds):
        sends = [send for done in rounds[i - 1] for send in sends_of(shape, done)] if i else []
        receives = [receive for compute in round_ for receive in receives_for(shape, compute)]
        if sends or receives:
            wait = Action(ActionKind.WAIT, round_[0].chunk, round_[0].micro_batch)
            actions += [*sends, *receives, wait]
        actions += round_
    return actions + [send for done in rounds[-1] for send in sends_of(shape, done)]


def receives_for(shape: PipelineShape, compute: Action) -> list[Action]:
    """What feeds `compute`: nothing for the first chunk's forward, the last one's backward, and a
    weights' half."""
    chunk, m = compute.chunk, compute.micro_batch
    if compute.kind is ActionKind.FORWARD and chunk > 0:
        return [Action(ActionKind.RECV_ACTIVATION, chunk, m, shape.stage_of(chunk - 1))]
    if compute.kind in INPUT_GRADIENTS and chunk < shape.last_chunk:
        return [Action(ActionKind.RECV_GRADIENT, chunk, m, shape.stage_of(chunk + 1))]
    return []


def sends_of(shape: PipelineShape, compute: Action) -> list[Action]:
    """Where the result goes: nowhere from the last chunk's forward, the first one's backward, and a
    weights' half."""
    chunk, m = compute.chunk, compute.micro_batch
    if compute.kind is ActionKind.FORWARD and chunk < shape.last_chunk:
        return [Action(ActionKind.SEND_ACTIVATION, chunk, m, shape.stage_of(chunk + 1))]
    if compute.kind in INPUT_GRADIENTS and chunk > 0:
        return [Action(ActionKind.SEND_GRADIENT, chunk, m, shape.stage_of(chunk - 1))]
    return []
