"""Batches on the device before they are asked for (MegaScale 3.4).

While the gradients of step k are synchronised, the batch of step k + 1 is taken from its loader,
copied to pinned memory and from there to the device, on a stream of its own. `next` finds device
tensors and has the compute stream wait for an event. On a CPU the same happens without streams.

Tokens and labels are views of windows of S + 1 int32: 5 bytes a token cross the bus with the mask,
and are cast and pulled apart on the device. There are two sets of buffers, host and device, made by
the first steps and then reused: set i is written again when the step that read it is behind
(`used`), so nothing is allocated in a step and nothing is freed while a stream reads it. The two
cost 82 bytes a token of a rank's share on the device, and 10 pinned.

Invariant: taking early is not training. A loader that has nothing yet is not waited for, an error
is raised by the `next` that needs the batch, and who rolls back throws this object away.

Shapes: N micro-batches of B sequences of S positions, W = S + 1, T = B S.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.data import BatchSource, MicroBatch
from megascale.flux.collectives import rank_slice
from megascale.model.context import ForwardContext
from megascale.ops.documents import Documents, make_documents
from megascale.parallel.spans import Span, no_span
from megascale.train.program import DeviceBatch, StageProgram


@dataclass(frozen=True)
class DeviceStep:
    """One step's position, and this rank's share of it on the device."""

    first_sample: int
    num_samples: int
    batches: tuple[DeviceBatch, ...]


class Buffers:
    """Tensors by name, on the device and pinned on the host, that grow and are never given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._host: dict[str, Tensor] = {}
        self._device: dict[str, Tensor] = {}
        self.copied = torch.cuda.Event() if self.on_cuda else None  # the host's may be written
        self.used = torch.cuda.Event() if self.on_cuda else None  # the device's may be written

    def place(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Room on the device; what is in it stays from the last time."""
        return _room(self._device, name, shape, dtype, self.device, pinned=False)

    def put(self, name: str, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Arrays of one shape, stacked and copied to the device without waiting."""
        dtype = torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype
        shape = (len(arrays), *arrays[0].shape)
        target = self.place(name, shape, dtype)
        host = target
        if self.on_cuda:
            host = _room(self._host, name, shape, dtype, torch.device("cpu"), pinned=True)
        for row, array in zip(host.numpy(), arrays, strict=True):
            row[...] = array
        return target.copy_(host, non_blocking=True) if self.on_cuda else target


def _room(
    kept: dict[str, Tensor],
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pinned: bool,
) -> Tensor:
    num = int(np.prod(shape))
    flat = kept.get(name)
    if flat is None or flat.numel() < num or flat.dtype != dtype:
        flat = kept[name] = torch.empty(num, dtype=dtype, device=device, pin_memory=pinned)
    return flat[:num].view(*shape)


def on_device(
    program: StageProgram,
    micro_batches: Sequence[MicroBatch],
    *,
    training: bool,
    buffers: Buffers | None = None,
) -> tuple[DeviceBatch, ...]:
    """One step's micro-batches, copied on the current stream and not waited for.

    buffers  reused ones; None: new ones
    """
    put = buffers or Buffers(program.device)
    windows_NBW = put.put("windows", [m.windows_BW for m in micro_batches])
    mask_NBS = put.put("mask", [m.loss_mask_BS for m in micro_batches])
    samples_NB = put.put("samples", [m.sample_numbers_B for m in micro_batches])
    shape = mask_NBS.shape
    seq_len = shape[-1]
    tokens_NBS = put.place("tokens", shape, torch.int64).copy_(windows_NBW[:, :, :-1])
    labels_NBS = put.place("labels", shape, torch.int64).copy_(windows_NBW[:, :, 1:])
    weights_NBS = put.place("weights", shape, program.main_dtype).copy_(mask_NBS)
    positions_S = torch.arange(seq_len, device=program.device)
    positions_NBS = put.place("positions", shape, torch.int64).copy_(positions_S)
    ids_NBS = put.place("token_ids", shape, torch.int64)
    ids_NBS.copy_(samples_NB[:, :, None] * seq_len + positions_S)
    documents = [_documents(put, i, batch) for i, batch in enumerate(micro_batches)]
    for positions_BS, document in zip(positions_NBS, documents, strict=True):
        if document is not None:
            positions_BS -= document.starts_BS
    model = program.config.model
    dropout = training and (model.hidden_dropout > 0 or model.attention_dropout > 0)
    rows = rank_slice(shape[1] * seq_len, program.groups.tensor)
    return tuple(
        DeviceBatch(
            tokens_T=tokens_NBS[i].flatten(),
            labels_T=labels_NBS[i].flatten(),
            mask_T=weights_NBS[i].flatten(),
            context=ForwardContext(
                seq_len=seq_len,
                positions_t=positions_NBS[i].flatten()[rows],
                token_ids_t=ids_NBS[i].flatten()[rows],
                sample_numbers_B=samples_NB[i],
                documents=documents[i],
                dropout_seed=program.config.training.seed if dropout else None,
                recompute=program.config.activation_checkpoint.mode,
                operators=program.config.operators.mode,
            ),
        )
        for i in range(len(micro_batches))
    )


def _documents(put: Buffers, number: int, batch: MicroBatch) -> Documents | None:
    if batch.document_starts_BS is None:
        return None
    starts_BS = torch.from_numpy(np.ascontiguousarray(batch.document_starts_BS))

    def move(host: Tensor) -> Tensor:
        kind = "starts" if host.dim() == 2 else "bounds"
        return put.put(f"document {kind} {number}", [host.numpy()])[0]

    return make_documents(starts_BS, move)


class DeviceBatches:
    """The steps of a loader as device tensors, a step ahead."""

    def __init__(
        self,
        source: BatchSource,
        program: StageProgram,
        *,
        training: bool = True,
        ahead: bool = True,
        span: Span = no_span,
    ) -> None:
        """`ahead`: `prefetch` takes what is ready; false: each step is taken when it is needed."""
        self._source, self._program = source, program
        self._training, self._ahead, self._span = training, ahead, span
        self._sets = (Buffers(program.device), Buffers(program.device))
        self._stream = torch.cuda.Stream(program.device) if self._sets[0].on_cuda else None
        self._turn = 0
        self._next: DeviceStep | BaseException | None = None
        self._waited_s = 0.0

    def prefetch(self) -> None:
        """Take the next step if its loader has it; called when a step's backward was issued."""
        if self._ahead and self._next is None and self._source.is_ready():
            try:
                self._next = self._take()
            except Exception as error:  # noqa: BLE001 - the `next` that needs it raises it
                self._next = error

    def __next__(self) -> DeviceStep:
        if self._next is None:
            step: DeviceStep | BaseException = self._take()
        else:
            with self._waiting():  # every step has the span, however short
                step, self._next = self._next, None
        if isinstance(step, BaseException):
            raise step
        self._hand_out()
        return step

    def take_waited_s(self) -> float:
        """Seconds that the host waited for its loader since the last call, early or not."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """Nothing more is taken; what was taken early is thrown away."""
        self._next = None
        self._source.close()

    def _take(self) -> DeviceStep:
        with self._waiting():
            batch = next(self._source)
        buffers = self._sets[self._turn]
        if self._stream is None:
            batches = self._copy(batch.micro_batches, buffers)
        else:
            assert buffers.copied is not None
            assert buffers.used is not None
            if not buffers.copied.query():  # two steps ago: long done
                buffers.copied.synchronize()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(buffers.used)
                batches = self._copy(batch.micro_batches, buffers)
                buffers.copied.record(self._stream)
        self._turn = 1 - self._turn
        return DeviceStep(batch.first_sample, batch.num_samples, batches)

    def _copy(
        self, micro_batches: Sequence[MicroBatch], buffers: Buffers
    ) -> tuple[DeviceBatch, ...]:
        return on_device(self._program, micro_batches, training=self._training, buffers=buffers)

    def _hand_out(self) -> None:
        """The compute stream waits for the set taken last; what it was given before is behind."""
        if self._stream is None:
            return
        compute = torch.cuda.current_stream(self._program.device)
        handed, before = self._sets[1 - self._turn], self._sets[self._turn]
        assert handed.copied is not None
        assert before.used is not None
        compute.wait_event(handed.copied)
        before.used.record(compute)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        since_s = time.monotonic()
        try:
            with self._span("data_wait", host=True):
                yield
        finally:
            self._waited_s += time.monotonic() - since_s
