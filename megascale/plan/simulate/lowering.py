"""From the action lists that the trainer executes to the engine's operations.

What `parallel/pipeline.py` and `transfers.py` do with each action, as operations:

* a compute waits for the receive that feeds it, and for nothing else;
* a send waits while SEND_WINDOW earlier ones of its channel are not over;
* WAIT (coupled transfers) waits for all that the stage has posted;
* HEAD waits for what the stage gave to the head before, meets all stages for the hidden states'
  broadcast, computes, posts the sum of the gradients, and computes its weights' gradients under it;
  the last chunk's backward waits for that sum. Broadcast and sum are priced as one transfer;
* at the end every send is waited for, and the head's last sum.

Where weight gradients are joined, BACKWARD_WEIGHT of a micro-batch either puts them off or computes
those of all that wait: `Costs` says which.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megascale.plan.actions import Action, ActionKind, PipelineShape
from megascale.plan.case import Layout
from megascale.plan.prices import ChunkPrices, StepPrices
from megascale.plan.schedules.transfers import SEND_WINDOW
from megascale.plan.simulate.buckets import Buckets
from megascale.plan.simulate.program import Label, StageProgram, TransferTable, Wire

Costs = Callable[[Action], float | None]
"""Seconds of a stage's computes, asked once each in the order of its list; None: nothing runs.

HEAD is asked for without its weights' half, which is BACKWARD_WEIGHT of the head's chunk.
"""

_KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
    ActionKind.HEAD: "head",
}


class PricedCosts:
    """`Costs` of one stage by prices, with weight gradients joined as the runtime joins them."""

    def __init__(self, prices: StepPrices, layout: Layout, micro_batches: int, head: int) -> None:
        self._joined, self._micro_batches = layout.join_weight_gradients, micro_batches
        self._waiting: Counter[int] = Counter()
        self._weights_done: Counter[int] = Counter()
        self._of = dict(enumerate(map(_Seconds.of, prices.chunks)))
        if prices.head is not None:
            self._of[head] = _Seconds.of(prices.head)

    def __call__(self, action: Action) -> float | None:
        seconds = self._of[action.chunk]
        if action.kind is ActionKind.FORWARD:
            return seconds.forward
        if action.kind is ActionKind.BACKWARD:
            return seconds.backward_input + seconds.backward_weight
        if action.kind is ActionKind.BACKWARD_INPUT:
            return seconds.backward_input
        if action.kind is ActionKind.HEAD:
            return seconds.forward + seconds.backward_input
        return self._weights(action.chunk, seconds.backward_weight)

    def _weights(self, chunk: int, seconds: float) -> float | None:
        self._waiting[chunk] += 1
        self._weights_done[chunk] += 1
        is_last = self._weights_done[chunk] == self._micro_batches
        if self._waiting[chunk] < self._joined and not is_last:
            return None
        return seconds * self._waiting.pop(chunk)


@dataclass(frozen=True)
class _Seconds:
    forward: float
    backward_input: float
    backward_weight: float

    @classmethod
    def of(cls, prices: ChunkPrices) -> _Seconds:
        return cls(
            prices.forward.total_s,
            prices.recompute.total_s + prices.backward_input.total_s,
            prices.backward_weight.total_s,
        )


@dataclass
class Lowering:
    """Of the actions of one stage.

    transfer_s     by chunk whose output travels; a gradient takes as long on its way back
    shared_head_s  of each of a shared head's two collectives
    send_window    most sends of a channel in flight
    """

    shape: PipelineShape
    stage: StageProgram
    table: TransferTable
    costs: Costs
    transfer_s: Sequence[float]
    buckets: Buckets
    shared_head_s: float = 0.0
    forward_only: bool = False
    send_window: int = SEND_WINDOW
    _received: dict[tuple[bool, int, int], int] = field(default_factory=dict)
    _sent: dict[Wire, deque[int]] = field(default_factory=dict)
    _posted: dict[Wire, int] = field(default_factory=dict)  # the newest on each channel
    _sums: dict[int, int] = field(default_factory=dict)  # of a head's gradients, by micro-batch
    _weights_done: Counter[int] = field(default_factory=Counter)

    def run(self, actions: Sequence[Action]) -> None:
        """Put all of `actions` in the stage's program, and what is waited for at the end behind."""
        steps = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward,
            ActionKind.BACKWARD_WEIGHT: self._weights,
            ActionKind.HEAD: self._head,
            ActionKind.SEND_ACTIVATION: self._send,
            ActionKind.SEND_GRADIENT: self._send,
            ActionKind.RECV_ACTIVATION: self._receive,
            ActionKind.RECV_GRADIENT: self._receive,
            ActionKind.WAIT: self._wait_for_all,
        }
        for action in actions:
            steps[action.kind](action)
        for transfer in [*(t for sent in self._sent.values() for t in sent), *self._sums.values()]:
            self.stage.need(transfer)

    # ------------------------------------------------------------ computes

    def _label(self, action: Action) -> int:
        return self.stage.label(_KINDS[action.kind], action.chunk, action.micro_batch)

    def _forward(self, action: Action) -> None:
        if action.chunk > 0:
            self.stage.need(self._received.pop((True, action.chunk, action.micro_batch)))
        self.buckets.forward(self._label(action), action.chunk, self._cost(action))

    def _backward(self, action: Action) -> None:
        chunk, m = action.chunk, action.micro_batch
        if chunk < self.shape.last_chunk:
            self.stage.need(self._received.pop((False, chunk, m)))
        elif m in self._sums:
            self.stage.need(self._sums.pop(m))
        label, seconds = self._label(action), self._cost(action)
        if action.kind is ActionKind.BACKWARD:
            self.buckets.backward(label, chunk, seconds, last=self._counts_last(chunk))
        else:
            self.buckets.backward_input(label, chunk, seconds)

    def _weights(self, action: Action) -> None:
        seconds, last = self.costs(action), self._counts_last(action.chunk)
        if seconds is not None:
            self.buckets.backward_weight(self._label(action), action.chunk, seconds, last=last)

    def _cost(self, action: Action) -> float:
        seconds = self.costs(action)
        assert seconds is not None, f"{action} cannot be put off"
        return seconds

    def _counts_last(self, chunk: int) -> bool:
        """Count weight gradients of `chunk`; whether they are the last of the step."""
        self._weights_done[chunk] += 1
        return self._weights_done[chunk] == self.shape.micro_batches

    # ------------------------------------------------------------ a shared head

    def _head(self, action: Action) -> None:
        m = action.micro_batch
        is_last_stage = self.stage.stage == self.shape.stages - 1
        if m - 1 in self._sums and not is_last_stage:
            self.stage.need(self._sums.pop(m - 1))
        self.stage.need(self._meet("head_input", action))
        self.buckets.forward(self._label(action), action.chunk, self._cost(action))
        if self.forward_only:
            return
        self._sums[m] = self._meet("head_gradient", action)
        self._weights(Action(ActionKind.BACKWARD_WEIGHT, action.chunk, m))

    def _meet(self, kind: str, action: Action) -> int:
        last = self.shape.stages - 1
        stages = (last, *range(last))
        label = Label(kind, action.chunk, action.micro_batch, "head")
        wire = Wire("head", last, 0)
        transfer = self.table.post(wire, self.stage.stage, stages, label, self.shared_head_s)
        self.stage.post(transfer)
        return transfer

    # ------------------------------------------------------------ transfers

    def _send(self, action: Action) -> None:
        is_activation = action.kind is ActionKind.SEND_ACTIVATION
        assert action.peer_stage is not None, action
        wire = _wire(is_activation, self.stage.stage, action.peer_stage)
        sent = self._sent.setdefault(wire, deque())
        while len(sent) >= self.send_window:
            self.stage.need(sent.popleft())
        leaves = action.chunk if is_activation else action.chunk - 1
        sent.append(self._post(wire, action, leaves))

    def _receive(self, action: Action) -> None:
        is_activation = action.kind is ActionKind.RECV_ACTIVATION
        assert action.peer_stage is not None, action
        wire = _wire(is_activation, action.peer_stage, self.stage.stage)
        leaves = action.chunk - 1 if is_activation else action.chunk
        transfer = self._post(wire, action, leaves)
        self._received[is_activation, action.chunk, action.micro_batch] = transfer

    def _post(self, wire: Wire, action: Action, leaves: int) -> int:
        """leaves  the chunk between which and the next one the value travels"""
        sent_from = leaves if wire.payload == "activation" else leaves + 1
        label = Label("transfer", sent_from, action.micro_batch, wire.payload)
        stages = (wire.source, wire.destination)
        seconds = self.transfer_s[leaves]
        transfer = self.table.post(wire, self.stage.stage, stages, label, seconds)
        self.stage.post(transfer)
        self._posted[wire] = transfer
        return transfer

    def _wait_for_all(self, _action: Action) -> None:
        """On each channel they are over in order, so the newest says it of all."""
        for transfer in self._posted.values():
            self.stage.need(transfer)
        self._posted.clear()
        for sent in self._sent.values():
            sent.clear()


def _wire(is_activation: bool, source: int, destination: int) -> Wire:
    return Wire("activation" if is_activation else "gradient", source, destination)
