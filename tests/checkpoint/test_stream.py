"""The bytes that go to a storage are those of the tensors end to end, wherever these lie."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from megascale.checkpoint.stream import stream_blocks


def _column() -> Tensor:
    """Of width 1, of a wide tensor: a row of it is one element, whose stride says nothing."""
    return torch.arange(60.0).view(20, 3)[:, 1:2]


TENSORS = {
    "column": [_column()],
    "element": [torch.arange(60.0).view(20, 3)[4:5, 1], _column()[3:4]],
    "row": [torch.arange(60.0).view(20, 3)[4:5]],
    "transposed": [torch.arange(60.0).view(20, 3).T],
    "long rows": [torch.arange(240.0).view(2, 120)[:, :100]],
    "broadcast": [torch.arange(5.0).view(5, 1).expand(5, 7)],
    "columns of columns": [torch.arange(120.0).view(5, 8, 3)[:, 2:7, 1:2]],
    "empty and scalar": [torch.empty(0, 3), torch.tensor(7.0), torch.empty(3, 0)],
    "dtypes": [_column(), torch.arange(9, dtype=torch.bfloat16)[::2], torch.arange(3)],
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("block_bytes", [1, 7, 16, 64, 4096])
def test_blocks_are_the_bytes_end_to_end(tensors: list[Tensor], block_bytes: int) -> None:
    expected = b"".join(
        torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for tensor in tensors
    )
    hashes: list[str] = []
    blocks = [bytes(block) for block in stream_blocks(tensors, hashes, block_bytes=block_bytes)]
    assert b"".join(blocks) == expected
    assert {len(block) for block in blocks[:-1]} <= {block_bytes}
    assert hashes == [hashlib.sha256(block).hexdigest() for block in blocks]
