"""A rank that has lost its slots gets its part from its keeper, by each way, and checks it.

Two ranks of two agents on this machine; each state is two chunks and a bit.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import Piece
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import HalfRestoredError, MemorySlots
from megascale.checkpoint.memory import serving as serving_module
from megascale.checkpoint.memory.serving import (
    Address,
    Connection,
    Server,
    ipv4_addresses,
    reachable,
)
from megascale.errors import CheckpointError
from megascale.shards import Box
from megascale.topology import Mesh
from tests.checkpoint.memory.test_slots import memory
from tests.distributed import run_ranks

__all__ = ["memory"]
SIZE = 9_000_000  # 36 MB


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("megascale").addHandler(self)
        logging.getLogger("megascale").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _expected(rank: int, step: int) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.float32) * (rank + 1) + step


def _open(
    folder: str, rank: int, values: torch.Tensor, **options: Any
) -> tuple[MemorySlots, torch.Tensor]:
    agent = Path(folder) / f"agent{rank}"
    agent.mkdir(exist_ok=True)
    count = torch.zeros((), dtype=torch.int64)
    box = Box((rank * SIZE,), (SIZE,))
    slots = MemorySlots(
        str(agent / "slots-000"),
        [Piece("master/a", (2 * SIZE,), box, values)],
        [Piece("count", (), Box((), ()), count)],
        Mesh(1, 2, 1),
        Ranks(dist.group.WORLD),
        identity="run",
        epoch=1,
        device=values.device,
        **options,
    )
    return slots, count


def _save(rank: int, _world_size: int, folder: str) -> None:
    values = torch.zeros(SIZE)
    slots, count = _open(folder, rank, values)
    for step in (1, 2, 3):
        values.copy_(_expected(rank, step))
        count.fill_(step)
        slots.begin(step, 8 * step)
        slots.settled()


def _restore(
    rank: int, _world_size: int, folder: str, ways: tuple[str, ...], trouble: str
) -> tuple[str, list[str]]:
    log, values = _Log(), torch.full((SIZE,), -1.0)
    if trouble == "unreachable":
        serving_module.Connection.__init__ = _refused  # type: ignore[method-assign,assignment]
    if trouble in ("flip", "gone"):
        socket.socket.sendfile = _broken_sendfile(trouble)  # type: ignore[method-assign]
    slots, count = _open(folder, rank, values)
    try:
        stamp = slots.restore(None, ways=ways)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}", log.lines
    assert stamp is not None
    assert torch.equal(values, _expected(rank, stamp.step)), "other values"
    assert count.item() == stamp.step
    values.copy_(_expected(rank, 4))
    slots.begin(4, 32)  # and goes on
    slots.settled()
    return f"step {stamp.step}", log.lines


def _refused(*_: object) -> None:
    raise CheckpointError("no route")


def _broken_sendfile(how: str) -> Any:
    """What a keeper sends, with a flipped bit in the second chunk or ended there."""
    numbers = itertools.count(1)

    def sendfile(self: socket.socket, file: Any, offset: int, count: int) -> None:
        number = next(numbers)
        file.seek(offset)
        data = bytearray(file.read(count))
        if number == 2 and how == "gone":
            self.close()
            return
        if number == 2:
            data[7] ^= 1
        self.sendall(data)

    return sendfile


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (("mapped", "connections", "group"), "rank 1 out of /dev/shm/"),
        (("connections", "group"), "rank 1 over 3 connections to 127.0.0.1"),
        (("group",), "rank 1 out of /dev/shm/"),
    ],
)
def test_a_lost_part_comes_by_each_way(memory: Path, ways: tuple[str, ...], said: str) -> None:
    run_ranks(_save, 2, str(memory))
    shutil.rmtree(memory / "agent1")
    results = run_ranks(_restore, 2, str(memory), ways, "")
    assert [outcome for outcome, _ in results] == ["step 3"] * 2
    lines = [line for line in results[0][1] if "got their memory slots" in line]
    assert len(lines) == 1
    assert lines[0].startswith("rank(s) 1 got their memory slots from their keepers: ")
    assert said in lines[0]
    assert "36,000,0" in lines[0], "with how many bytes"


def test_a_keeper_that_is_not_reached_sends_over_the_group(memory: Path) -> None:
    run_ranks(_save, 2, str(memory))
    shutil.rmtree(memory / "agent0")
    results = run_ranks(_restore, 2, str(memory), ("connections", "group"), "unreachable")
    assert [outcome for outcome, _ in results] == ["step 3"] * 2
    assert any("rank 0 does not reach rank 1" in line for line in results[0][1])
    assert not any("token" in line for _, lines in results for line in lines), "a secret is told"


@pytest.mark.parametrize(
    ("trouble", "why"), [("flip", "another hash"), ("gone", "rank 0 was lost while it sent")]
)
def test_what_arrives_broken_is_not_trained_on(memory: Path, trouble: str, why: str) -> None:
    """On all ranks alike: what is live is neither the old state nor the new."""
    run_ranks(_save, 2, str(memory))
    shutil.rmtree(memory / "agent1")
    results = run_ranks(_restore, 2, str(memory), ("connections",), trouble)
    for outcome, _ in results:
        assert outcome.startswith(f"{HalfRestoredError.__name__}: rank 1 of 2: "), outcome
        assert why in outcome


# ---------------------------------------------------------------- the two ends


def test_ranges_are_served_to_who_knows_the_token(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(b"a" * 100)
    files[1].write_bytes(bytes(range(256)) * 1000)
    server = Server(files, loopback_only=True)
    try:
        assert server.address.hosts == ("127.0.0.1",)
        connection = Connection("127.0.0.1", server.address, 1, keeper=3)
        into = torch.zeros(1000, dtype=torch.uint8)
        connection.ask(256 * 10 + 5, 1000)
        connection.ask(0, 3)
        connection.take(into)
        assert into.tolist() == [(5 + i) % 256 for i in range(1000)]
        connection.take(into[:3])
        assert into[:3].tolist() == [0, 1, 2]
        connection.close()
        stranger = Address(server.address.hosts, server.address.port, b"x" * 32)
        assert reachable(server.address, 0, 3, same_host=True) == ["127.0.0.1"]
        assert reachable(stranger, 0, 3, same_host=True) == []
        assert reachable(server.address, 0, 3, same_host=False) == [], "loopback is one's own"
        assert repr(server.address.token) not in repr(server.address)
    finally:
        server.close()
    assert reachable(server.address, 0, 3, same_host=True) == []


def test_a_server_for_other_machines_tells_addresses_of_this_one(tmp_path: Path) -> None:
    server = Server([tmp_path / "a"], loopback_only=False)
    try:
        assert server.address.hosts == (*ipv4_addresses(), "127.0.0.1")
        assert reachable(server.address, 0, 3, same_host=True) == list(server.address.hosts)
    finally:
        server.close()
    assert not any(host.startswith("127.") for host in ipv4_addresses())


def test_a_keeper_that_ends_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 100)
    server = Server([tmp_path / "a"], loopback_only=True)
    connection = Connection("127.0.0.1", server.address, 0, keeper=3)
    server.close()
    connection.ask(0, 100)
    with pytest.raises(CheckpointError, match="rank 3 was lost while it sent"):
        connection.take(torch.zeros(100, dtype=torch.uint8))
    connection.close()
