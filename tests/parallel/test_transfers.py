"""Channels: which there are, in which order they are made, what happens when a peer is absent."""

from __future__ import annotations

import time

import pytest
import torch

from megascale.errors import LaunchError
from megascale.parallel.transfers import Transfers, channels_in_order, create_links
from megascale.plan.actions import Channel, Payload
from megascale.plan.schedules import build_schedule
from megascale.topology import Mesh
from tests.distributed import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("stages", "v"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (4, 3)])
def test_a_channel_for_each_that_the_schedules_use(stages: int, v: int) -> None:
    name = "interleaved_1f1b" if v > 1 else "1f1b"
    schedule = build_schedule(
        name, stages=stages, chunks_per_stage=v, micro_batches=2 * stages, transfers="decoupled"
    )
    used = {
        action.channel(stage)
        for stage, actions in enumerate(schedule.actions)
        for action in actions
        if action.peer_stage is not None
    }
    created = channels_in_order(Mesh(pipeline=stages), wrap=v > 1)
    assert len(created) == len(used)
    assert {channel for channel, _, _ in created} == used


def test_the_order_connects_a_chain_in_two_rounds() -> None:
    """Each round's edges share no rank; global ranks follow the mesh."""
    order = channels_in_order(Mesh(tensor=2, pipeline=4), wrap=True)
    pairs = [{source, destination} for _, source, destination in order]
    for half in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
        distinct = {frozenset(pair) for pair in half}
        assert sum(len(pair) for pair in distinct) == len(set.union(*half))
    assert (Channel(3, 0, Payload.ACTIVATION), 7, 1) in order
    assert (Channel(0, 3, Payload.GRADIENT), 1, 7) in order


def _head_on(rank: int, world_size: int) -> list[float]:
    """Both send two values in each direction before either receives; receives in another order."""
    links = create_links(Mesh(pipeline=2), wrap=True, device=CPU, timeout_s=20.0)
    transfers = Transfers(links, shape=(70_000,), dtype=torch.float32, device=CPU)
    peer = 1 - rank
    for payload in (Payload.ACTIVATION, Payload.GRADIENT):
        for k in range(2):
            value = torch.full((70_000,), 10.0 * rank + k + 100 * (payload is Payload.GRADIENT))
            transfers.send(Channel(rank, peer, payload), value)
    found = []
    for payload in (Payload.GRADIENT, Payload.ACTIVATION):
        receives = [transfers.receive(Channel(peer, rank, payload)) for _ in range(2)]
        found += [receive.wait().mean().item() for receive in receives]
    transfers.finish()
    return found


def test_no_channel_blocks_another() -> None:
    assert run_ranks(_head_on, 2) == [[110.0, 111.0, 10.0, 11.0], [100.0, 101.0, 0.0, 1.0]]


def _silent_peer(rank: int, world_size: int) -> str:
    links = create_links(Mesh(pipeline=2), wrap=False, device=CPU, timeout_s=1.0)
    if rank == 1:
        time.sleep(2.0)
        return ""
    transfers = Transfers(links, shape=(1,), dtype=torch.float32, device=CPU)
    receive = transfers.receive(Channel(1, 0, Payload.GRADIENT))
    try:
        receive.wait()
    except LaunchError as error:
        return str(error)
    return "nothing"


def test_a_silent_peer_is_named() -> None:
    assert "rank 0 failed while receiving gradient from rank 1" in run_ranks(_silent_peer, 2)[0]
