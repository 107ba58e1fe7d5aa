"""The loading itself: blocks come in checked, their values go into the pieces and to other ranks.

Why no rank waits for ever. A rank goes through its rounds in order. In a round it (1) posts the
receives of all headers (one byte: does a body follow?), (2) reads its blocks, which waits for the
storage alone, and posts header and body of every message, (3) waits for the headers, and posts and
awaits the bodies that were announced, (4) waits until its own have gone out. Take the ranks that
are in the least round that any is in: whatever they wait for in (3) and (4) is of this round, from
or to ranks that are in it or beyond it. Those beyond have sent and received all of it; those in it
post everything before they wait for anything, and a body's receive as soon as its header is there.
So some rank always goes on. Messages of a pair are told apart by their place in the round.

A rank that fails goes on through its rounds with headers that announce nothing, and so does whoever
gets one: nobody waits for data that will not come, and nothing large moves any more. At the end all
ranks agree on what happened (`outcome.py`). A peer that is gone is skipped from there on. Each wait
has a deadline.

Host memory of a rank: the blocks that are read ahead (`window.py`: 8, or 12 from an object store),
and in a round 4 blocks' worth received and what is sent of 4 blocks, equal messages once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from megascale.checkpoint.agree import Ranks, enclosed
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.reading.files import Files
from megascale.checkpoint.reading.messages import Message, Messages, PeerGoneError
from megascale.checkpoint.reading.outcome import Agreement, Kind, Outcome
from megascale.checkpoint.reading.plan import BlockId, Part, RankPlan, Read, Receive, Round
from megascale.checkpoint.reading.window import Window, make_buffer, read_verified
from megascale.shards import Box

_ALIGNMENT = 16  # of parts in a message: any dtype can be seen in it


def read_pieces(
    files: Files, plan: RankPlan, pieces: Sequence[Piece], ranks: Ranks, *, patience_s: float
) -> None:
    """Fill the pieces. Collective; raises CheckpointError on all ranks (DamagedError where another
    checkpoint may be whole); pieces may then be half filled.

    patience_s  for a rank that says nothing, and a little less for a block
    """
    messages = Messages(ranks, patience_s)
    agreement = Agreement(messages)
    reading = _Reading(files, plan, pieces, messages, agreement)
    try:
        for turn in plan.rounds:
            reading.round(turn)
        for read in plan.alone:
            reading.read(read)
    except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it was
        reading.failed(error)
    finally:
        reading.window.close()
    with enclosed():
        outcome = agreement.conclude(reading.outcome)
    messages.close()
    outcome.raise_if_bad()


class _Reading:
    """One load on one rank. What fails on the way is kept as `outcome`."""

    def __init__(
        self,
        files: Files,
        plan: RankPlan,
        pieces: Sequence[Piece],
        messages: Messages,
        agreement: Agreement,
    ) -> None:
        self._messages = messages
        self._agreement = agreement
        self.outcome = Outcome(Kind.GOOD)
        self._targets = [piece.tensor.detach() for piece in pieces]
        self._on_device = any(target.is_cuda for target in self._targets)
        self.window = Window(
            files.storage,
            (files.block(*read.block) for read in plan.reads()),
            block_bytes=files.block_bytes,
            pinned=self._on_device,
        )

    def round(self, turn: Round) -> None:
        received, sending = _Tags(), _Tags()
        expected = [(receive, received.of(receive.reader)) for receive in turn.receives]
        headers = [
            self._post_receive(_header(False), receive.reader, 2 * tag) for receive, tag in expected
        ]
        sent = [message for read in turn.reads for message in self.read(read, sending)]
        with enclosed():
            bodies = [
                (receive, self._announced(header, receive, tag))
                for header, (receive, tag) in zip(headers, expected, strict=True)
            ]
            for receive, body in bodies:
                if body is None:
                    continue
                if self._arrived(body) and self.outcome.kind == Kind.GOOD:
                    self._unpack(receive.parts, body.tensor)
            for message in sent:
                self._arrived(message)

    def read(self, read: Read, tags: _Tags | None = None) -> list[Message]:
        """Take the next block of the window; what is sent of it."""
        packed: dict[object, Tensor] = {}
        if self.outcome.kind == Kind.GOOD:
            try:
                packed = self._take(read)
            except Exception as error:  # noqa: BLE001 - the peers wait for our word, whatever it was
                self.failed(error)
        sent = []
        for peer, parts in read.sends:
            assert tags is not None, read
            tag = tags.of(peer)
            body = packed.get(_content(parts))
            sent.append(self._send(_header(body is not None), peer, 2 * tag))
            if body is not None:
                sent.append(self._send(body, peer, 2 * tag + 1))
        return [message for message in sent if message is not None]

    def _take(self, read: Read) -> dict[object, Tensor]:
        """Own parts go into the pieces; those of others, equal ones once, into messages."""
        self._agreement.still_reading()
        # whoever cannot read says so before the others give it up
        buffer, block = self.window.next(0.8 * self._messages.patience_s)
        copy_parts(read.own, block, self._targets)
        packed: dict[object, Tensor] = {}
        for _, parts in read.sends:
            if _content(parts) not in packed:
                packed[_content(parts)] = _pack(parts, block)
        if self._on_device:
            buffer.busy = torch.cuda.Event()
            buffer.busy.record()
        self.window.release(buffer)
        return packed

    def _unpack(self, parts: tuple[Part, ...], body: Tensor) -> None:
        for start, part in zip(_starts(parts), parts, strict=False):
            values = _values(body, start, part.source.shape, part.dtype)
            _narrow(self._targets[part.piece], part.target).copy_(values, non_blocking=True)

    def _announced(self, header: Message | None, receive: Receive, tag: int) -> Message | None:
        """The receive of the body, if one comes."""
        if header is None or not self._arrived(header):
            return None
        if not header.tensor.item():
            self._ended(Outcome(Kind.STOPPED, f"rank {receive.reader} stopped"))
            return None
        # pinned, or the copy to the device would wait for it; its allocator knows of that copy
        body = torch.empty(
            _starts(receive.parts)[-1], dtype=torch.uint8, pin_memory=self._on_device
        )
        return self._post_receive(body, receive.reader, 2 * tag + 1)

    def _post_receive(self, tensor: Tensor, peer: int, tag: int) -> Message | None:
        try:
            return self._messages.receive(tensor, peer, tag)
        except PeerGoneError as error:
            self.failed(error)
            return None

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Message | None:
        try:
            return self._messages.send(tensor, peer, tag)
        except PeerGoneError as error:
            self.failed(error)
            return None

    def _arrived(self, message: Message) -> bool:
        try:
            self._messages.wait(message)
        except PeerGoneError as error:
            self.failed(error)
            return False
        return True

    def failed(self, error: Exception) -> None:
        self._ended(Outcome.of(error))

    def _ended(self, outcome: Outcome) -> None:
        """The first own failure is told; that another stopped gives way to it."""
        if self.outcome.kind <= Kind.STOPPED and outcome.kind > self.outcome.kind:
            self.outcome = outcome
            self.window.close()


def read_block(files: Files, block: BlockId) -> Tensor:
    """A block, checked, in memory of its own."""
    source = files.block(*block)
    buffer = make_buffer(source.num_bytes, pinned=False)
    read_verified(files.storage, source, buffer.view)
    return buffer.tensor


def copy_parts(parts: Iterable[Part], block: Tensor, targets: Sequence[Tensor]) -> None:
    """From a block into the pieces; to a GPU on its current stream, without waiting."""
    for part in parts:
        saved = _values(block, part.start, part.shape, part.dtype)
        target = _narrow(targets[part.piece], part.target)
        target.copy_(_narrow(saved, part.source), non_blocking=True)


class _Tags:
    """Numbers the messages of a round in one direction, by peer; both ends count alike."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def of(self, peer: int) -> int:
        number = self._next.get(peer, 0)
        self._next[peer] = number + 1
        return number


def _header(follows: bool) -> Tensor:
    return torch.tensor([follows], dtype=torch.uint8)


def _content(parts: tuple[Part, ...]) -> object:
    """Equal for messages of the same values."""
    return tuple((part.start, part.shape, part.source, part.dtype) for part in parts)


def _starts(parts: tuple[Part, ...]) -> list[int]:
    """Where each part begins in a message, and the length of the message."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _pack(parts: tuple[Part, ...], block: Tensor) -> Tensor:
    starts = _starts(parts)
    body = torch.empty(starts[-1], dtype=torch.uint8)
    for start, part in zip(starts, parts, strict=False):
        saved = _values(block, part.start, part.shape, part.dtype)
        target = _values(body, start, part.source.shape, part.dtype)
        target.copy_(_narrow(saved, part.source))
    return body


def _values(memory: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _narrow(tensor: Tensor, box: Box) -> Tensor:
    for axis, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, length)
    return tensor
