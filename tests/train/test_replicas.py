"""The digest of parameters notices what a checksum should, and replicas are compared by it."""

from __future__ import annotations

import pytest
import torch

from megascale.config import load_config
from megascale.errors import NumericalError
from megascale.events import Event, Incident
from megascale.telemetry.clock import MonotonicClock
from megascale.telemetry.diagnose.replicas import differing_replicas
from megascale.telemetry.recorder import Recorder
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


def _corrupt_one(rank: int, world_size: int) -> tuple[str, list[Incident]]:
    config = load_config(None, [*TINY, "training.global_batch_size=12"])
    assembly = assemble(config, config.mesh(world_size), torch.device("cpu"))
    events: list[Event] = []
    recorder = Recorder(MonotonicClock(), events.append, rank=rank)
    check_replicas(assembly, "before", recorder)
    assert not events
    if rank == 1:
        assembly.zero.buckets[0].parameters[7] += 1.0
    with pytest.raises(NumericalError, match=r"after: parameters differ.*chunk0\.embed") as seen:
        check_replicas(assembly, "after", recorder, 6, 4)
    return str(seen.value), [event for event in events if isinstance(event, Incident)]


@pytest.mark.full
def test_of_two_replicas_both_tell_their_bits_and_none_is_named() -> None:
    seen = run_ranks(_corrupt_one, 2)
    assert all("none of 2 replicas has a majority" in message for message, _ in seen)
    digests = _told(seen)
    assert digests[0] != digests[1]
    finding = differing_replicas(digests, [(0, 1)], 6)
    assert finding is not None
    assert (finding.ranks, finding.certain) == ((0, 1), False)


@pytest.mark.full
def test_of_three_replicas_every_rank_tells_what_names_the_corrupt_one() -> None:
    seen = run_ranks(_corrupt_one, 3)
    assert all("rank 1 holds other bits than most of 3" in message for message, _ in seen)
    finding = differing_replicas(_told(seen), [(0, 1, 2)], 6)
    assert finding is not None
    assert (finding.ranks, finding.certain) == ((1,), True)


def _told(seen: list[tuple[str, list[Incident]]]) -> dict[int, dict[str, str]]:
    digests = {}
    for rank, (_, incidents) in enumerate(seen):
        (incident,) = incidents
        assert (incident.name, incident.step, incident.rank) == ("replicas_differ", 6, rank)
        assert incident.detail["agreed_step"] == 4
        digests[rank] = incident.detail["digests"]
        assert len(digests[rank]) == 1, "of the bucket that differs alone"
    return digests
