"""DESIGN.md decision 6: a kernel that waits for peers starves no transfer that a peer waits for.

The circle to avoid: rank 0's NCCL send holds SMs until rank 1 receives; rank 1's receive finds no
SM, because a fused kernel fills the device and waits for tiles of rank 0; and the programs of
rank 0 that would make them have no place beside the send. Fused operators leave SMs to NCCL
(`reserve_sms`); the chunked form has no kernel that fills the device and waits.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.flux.gpu_calls import MILLISECOND, Calls, Verdict
from tests.flux.gpu_cases import settle

NCCL_BLOCKS = 4  # SMs of one transfer at most
SIZE = 1 << 20  # of a message, in floats
STEPS = {"fused": 1000, "chunked": 300}


def _links(world_size: int) -> list[dist.ProcessGroup]:
    """A communicator from each rank to the next, as the pipeline has them; collective."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = NCCL_BLOCKS
    return [
        dist.new_group(sorted({rank, (rank + 1) % world_size}), backend="nccl", pg_options=options)
        for rank in range(world_size)
    ]


class _Ring:
    """A message to the next rank and one from the rank before, every step another value."""

    def __init__(self, rank: int, world_size: int) -> None:
        links = _links(world_size)
        self._next, self._previous = (rank + 1) % world_size, (rank - 1) % world_size
        self._out, self._in = links[rank], links[self._previous]
        self.sent = torch.zeros(SIZE, device="cuda")
        self.received = torch.empty(SIZE, device="cuda")
        for link in range(world_size):  # communicators are made in one order
            if link == rank:
                self.send().wait()
            if link == self._previous:
                self.receive().wait()
            settle()

    def send(self) -> Any:
        return dist.isend(self.sent, self._next, group=self._out)

    def receive(self) -> Any:
        return dist.irecv(self.received, self._previous, group=self._in)


def _steps(rank: int, world_size: int, mode: str) -> list[str]:
    assert dist.group.WORLD is not None
    reserve = 2 * NCCL_BLOCKS if mode == "fused" else 0
    calls = Calls(dist.group.WORLD, mode, {"reserve_sms": reserve})
    failures = calls.prepare([64 * world_size, 1001, 512 * world_size])
    ring, side = _Ring(rank, world_size), torch.cuda.Stream()
    shared, own, verdict = random.Random(11), random.Random(77 + rank), Verdict()
    arrived = torch.zeros((), dtype=torch.int64, device="cuda")
    main = torch.cuda.current_stream()
    for step in range(STEPS[mode]):
        ring.sent.fill_(step * world_size + rank)
        side.wait_stream(main)
        draws = random.Random(shared.random())  # of the calls of this step, in order on all ranks
        order = ["send", "receive", "ops"]
        own.shuffle(order)
        works = []
        for what in order:
            _delay(own)
            if what == "ops":
                for _ in range(2):
                    calls.call_any(draws, verdict)
                continue
            with torch.cuda.stream(side):  # beside the operators and not behind them
                _delay(own)
                works.append(ring.send() if what == "send" else ring.receive())
        for work in works:
            work.wait()
        arrived += (ring.received != step * world_size + (rank - 1) % world_size).any()
    settle()
    failures += verdict.failures(f"rank {rank}, {mode}, beside transfers")
    return failures + ([f"rank {rank}: {int(arrived)} messages are wrong"] if int(arrived) else [])


def _delay(own: random.Random) -> None:
    draw = own.random()
    if draw < 0.2:
        torch.cuda._sleep(int(own.random() * MILLISECOND / 4))
    elif draw < 0.4:
        time.sleep(own.random() * 3e-4)


def _both(rank: int, world_size: int) -> list[str]:
    return [line for mode in STEPS for line in _steps(rank, world_size, mode)]


@pytest.mark.multi_gpu
def test_pending_transfers_and_waiting_kernels_end() -> None:
    found = run_ranks(_both, torch.cuda.device_count(), cuda=True, timeout_s=110)
    assert [line for lines in found for line in lines] == []
