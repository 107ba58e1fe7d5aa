"""A header says what lies where, and the safetensors library agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megascale.checkpoint.layout import HEADER_ALIGNMENT, Entry, decode_header, encode_header
from megascale.errors import CheckpointError
from megascale.shards import Box

ENTRIES = [
    Entry("master/a.weight", (8, 4), Box((2, 0), (3, 4)), torch.float32, 0),
    Entry("master/a.weight", (8, 4), Box((6, 1), (1, 2)), torch.float32, 48),
    Entry("count/updates", (), Box((), ()), torch.float32, 56),
    Entry("exp_avg/a@b.weight", (4,), Box((1,), (3,)), torch.bfloat16, 60),
]


def test_there_and_back() -> None:
    header = encode_header(ENTRIES)
    assert len(header) % HEADER_ALIGNMENT == 0
    assert decode_header(header, "x") == ENTRIES


def test_safetensors_opens_it(tmp_path: Path) -> None:
    values = torch.arange(14, dtype=torch.float32)
    more = torch.arange(4).to(torch.float32), torch.ones(3, dtype=torch.bfloat16)
    path = tmp_path / "rank.safetensors"
    body = values.numpy().tobytes() + more[0][:1].numpy().tobytes()
    path.write_bytes(encode_header(ENTRIES) + body + more[1].view(torch.uint8).numpy().tobytes())
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {entry.name for entry in ENTRIES}
        assert torch.equal(file.get_tensor("master/a.weight@2,0"), values[:12].view(3, 4))
        assert torch.equal(file.get_tensor("master/a.weight@6,1"), values[12:].view(1, 2))
        assert torch.equal(file.get_tensor("exp_avg/a@b.weight@1"), more[1])


@pytest.mark.parametrize(
    "header",
    [b"", b"\x08" + bytes(7) + b"nonsense", encode_header(ENTRIES).replace(b"ega", b"egi")],
)
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"step-1/x is not a file of this format"):
        decode_header(header, "step-1/x")


def test_sizes_that_contradict_are_refused() -> None:
    header = encode_header(ENTRIES).replace(b"[0,48]", b"[0,44]")
    with pytest.raises(CheckpointError, match="its shape needs 48"):
        decode_header(header, "x")
