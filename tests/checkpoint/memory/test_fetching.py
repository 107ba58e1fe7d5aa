"""Values get to live storage by several threads, whatever the source, and are checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.fetching import Mapped, Sent, Source, fill
from megascale.checkpoint.memory.hashing import CHUNK_BYTES, Hasher
from megascale.checkpoint.memory.serving import Connection, Server
from megascale.checkpoint.memory.slot import Slot
from megascale.errors import CheckpointError
from tests.checkpoint.layouts import whole
from tests.checkpoint.memory.test_slots import DEVICES, memory

__all__ = ["memory"]
Opening = Callable[[Slot, Body, Server, str], Source]
SOURCES: dict[str, Opening] = {
    "mapped": lambda slot, body, _, device: Mapped(
        slot.image[body.start :], in_buffer=device == "cuda"
    ),
    "sent": lambda _, body, server, __: Sent(
        Connection("127.0.0.1", server.address, 0, keeper=1), body.start
    ),
}


def _body(device: str, *, is_filled: bool) -> tuple[list[torch.Tensor], Body]:
    """2.5 chunks: doubles, floats that are a matrix's column, bfloat16, and a copy of a count."""
    generator = torch.Generator().manual_seed(7)
    tensors = [
        torch.randn(CHUNK_BYTES // 8 + 3, generator=generator, dtype=torch.float64),
        torch.randn(CHUNK_BYTES // 8 + 1, 2, generator=generator),
        torch.randn(CHUNK_BYTES // 4 - 9, generator=generator).bfloat16(),
        torch.tensor(12345),
    ]
    tensors = [tensor.to(device) for tensor in tensors]
    if not is_filled:
        tensors = [torch.zeros_like(tensor) for tensor in tensors]
    views = [tensors[0], tensors[1][:, 1], tensors[2], tensors[3]]
    pieces = [whole(f"master/{name}", view) for name, view in enumerate(views)]
    return views, Body(pieces[2::-1], pieces[3:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_all_arrives_and_is_checked(
    memory: Path, device: str, source: str, num_threads: int
) -> None:
    saved, body = _body(device, is_filled=True)
    slot = Slot(memory / "slot")
    slot.allocate(body.image_bytes)
    body.copy_out(slot.image)
    if device == "cuda":
        torch.cuda.synchronize()
    body_hash = Hasher().hash_of(slot.image[body.start :])
    server = Server([slot.path], loopback_only=True)
    live, empty = _body(device, is_filled=False)

    def restore() -> None:
        fill(
            empty,
            lambda _: SOURCES[source](slot, body, server, device),
            body_hash=body_hash,
            num_threads=num_threads,
            device=live[0].device,
        )

    try:
        restore()
        for before, after in zip(saved, live, strict=True):
            assert torch.equal(before, after)
        slot.image[body.start + 2 * CHUNK_BYTES + 1] ^= 4
        with pytest.raises(CheckpointError, match="another hash"):
            restore()
    finally:
        server.close()


def test_one_thread_that_fails_ends_all(memory: Path) -> None:
    live, body = _body("cpu", is_filled=False)
    slot = Slot(memory / "slot")
    slot.allocate(body.image_bytes)

    class Gone(Mapped):
        def take(self, start: int, buffer: torch.Tensor) -> torch.Tensor:
            raise CheckpointError("rank 1 was lost")

    def source(thread: int) -> Source:
        kind = Gone if thread == 1 else Mapped
        return kind(slot.image[body.start :], in_buffer=False)

    with pytest.raises(CheckpointError, match="rank 1 was lost"):
        fill(body, source, body_hash=None, num_threads=2, device=live[0].device)
