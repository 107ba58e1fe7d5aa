"""The digest of parameters notices what a checksum should, and replicas are compared by it."""

from __future__ import annotations

import pytest
import torch

from megascale.config import load_config
from megascale.errors import NumericalError
from megascale.train.assemble import assemble
from megascale.train.replicas import check_replicas, digest
from tests.distributed import run_ranks
from tests.train.harness import TINY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_digest_sees_one_bit_and_an_exchange(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = values.clone()
    assert digest(values) == digest(same)
    words = same.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    words[500] ^= 1
    assert digest(values) != digest(same)
    swapped = values.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert digest(values) != digest(swapped)


def test_digest_is_the_weighted_sum_of_words() -> None:
    values = torch.tensor([1.0, -2.5, 0.0])
    words = [int(word) for word in values.view(torch.int32)]
    expected = sum(word * (2 * place + 1) for place, word in enumerate(words)) % 2**64
    assert digest(values).item() % 2**64 == expected


def _corrupt_one(rank: int, world_size: int) -> str:
    config = load_config(None, TINY)
    assembly = assemble(config, config.mesh(world_size), torch.device("cpu"))
    check_replicas(assembly, "before")
    if rank == 1:
        assembly.zero.buckets[0].parameters[7] += 1.0
    with pytest.raises(NumericalError, match=r"after: parameters differ.*chunk0\.embed"):
        check_replicas(assembly, "after")
    return "seen"


@pytest.mark.full
def test_a_corrupt_replica_is_seen_by_all() -> None:
    assert run_ranks(_corrupt_one, 2) == ["seen", "seen"]
