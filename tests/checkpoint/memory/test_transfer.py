"""Copies of a save: whole and unchanged, paced, and cut off where a rank goes while it sends."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megascale.checkpoint.memory import transfer as transfer_module
from megascale.checkpoint.memory.hashing import Hasher
from megascale.checkpoint.memory.pacing import Pacer
from megascale.checkpoint.memory.slot import HEADER_BYTES, MARK_AT, Slot
from megascale.checkpoint.memory.transfer import CHUNK_BYTES, transfer
from megascale.errors import CheckpointError
from tests.checkpoint.memory.test_bring import _expected, _Log, _open, _restore
from tests.checkpoint.memory.test_slots import memory
from tests.distributed import forkserver, run_ranks

__all__ = ["memory"]
NUM_BYTES = 3 * CHUNK_BYTES + 777


def _image(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)


def _exchange(rank: int, world_size: int) -> tuple[bool, bool, float, int]:
    """A ring of ranks; the header is written while the values go; the network is busy at first."""
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    sent, received = _image(rank), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    header, sent[:MARK_AT] = sent[:MARK_AT].clone(), 0
    asked: list[float] = []

    def is_busy() -> bool:
        asked.append(time.monotonic())
        return len(asked) <= 20

    def write_header() -> None:
        sent[:MARK_AT] = header

    pacer = Pacer(is_busy, most_s=10.0)
    group = dist.group.WORLD
    assert group is not None
    for _ in range(2):
        received.zero_()
        transfer(
            [(sent, following)],
            [(received, before)],
            group,
            pacer=pacer,
            before_header=write_header,
        )
    wanted = _image(before)
    is_equal = torch.equal(received[:MARK_AT], wanted[:MARK_AT])
    is_equal = is_equal and torch.equal(received[HEADER_BYTES:], wanted[HEADER_BYTES:])
    has_mark = bool(received[MARK_AT:HEADER_BYTES].any())
    return is_equal, has_mark, pacer.waited_s, len(asked)


def test_images_arrive_whole_but_for_the_mark_when_the_network_is_idle() -> None:
    for is_equal, has_mark, waited_s, num_asked in run_ranks(_exchange, 3):
        assert is_equal
        assert not has_mark
        assert 20 * 0.002 <= waited_s < 5.0
        assert num_asked == 20 + 2 * 3, "once a chunk of values, and while it was busy"


def _entry(rank: int, store: str, folder: str, said: str) -> None:
    """Two saves; in the third rank 1 ends in the middle of its copy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    log, values = _Log(), torch.zeros_like(_expected(rank, 0))
    group = dist.new_group(timeout=timedelta(seconds=5))
    slots, count = _open(folder, rank, values, is_behind=True, group_behind=group)
    for step in (1, 2, 3):
        values.copy_(_expected(rank, step))
        count.fill_(step)
        slots.begin(step, 8 * step)
        if (rank, step) == (1, 3):
            _die_in_second_chunk()
        slots.settled()
    try:
        slots.join()
    except CheckpointError as error:
        Path(said).write_text("\n".join([str(error), *log.lines]))
    os._exit(0)


def _die_in_second_chunk() -> None:
    send, calls = transfer_module._send, []

    def die(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            time.sleep(0.2)  # the first is there
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*arguments)

    transfer_module._send = die  # type: ignore[assignment]


def test_a_rank_that_goes_while_it_sends_costs_the_copy_alone(memory: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    arguments = (str(tmp_path / "store"), str(memory), str(said))
    ranks = [forkserver.Process(target=_entry, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60.0)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    error, *lines = said.read_text().splitlines()
    assert "rank 1 was cut off" in error
    assert any("the own slot of this save counts for a restart" in line for line in lines)
    steps: dict[str, set[int]] = {"own": set(), "copy": set()}
    for file in memory.glob("agent0/*"):
        header = Slot(file).header()
        if header is not None:
            assert Slot(file).is_whole(header, Hasher())
            steps[file.suffix[1:-1]].add(header.stamp.step)
    assert steps == {"own": {2, 3}, "copy": {2}}
    results = run_ranks(_restore, 2, str(memory), ("mapped",), "")
    assert [outcome for outcome, _ in results] in (["step 2"] * 2, ["step 3"] * 2)


def _paced_saves(rank: int, _world_size: int, folder: str) -> tuple[list[int], Any]:
    """Saves whose copies always meet a busy network, so each takes 0.5 s and more."""
    values, told = torch.zeros_like(_expected(rank, 0)), []
    slots, count = _open(
        folder,
        rank,
        values,
        is_behind=True,
        group_behind=dist.new_group(),
        network_is_busy=lambda: True,
        most_paced_s=0.5,
        told=lambda kind, detail: told.append((kind, detail["why"], detail["waited_s"])),
    )
    for step in (1, 2, 3, 4):
        values.copy_(_expected(rank, step))
        count.fill_(step)
        slots.begin(step, 8 * step)
        slots.settled()
    slots.join()
    headers = [Slot(file).header() for file in Path(folder).glob(f"agent{rank}/*")]
    return sorted(header.stamp.step for header in headers if header), told


def test_a_copy_that_is_late_delays_the_next_save_and_none_is_dropped(memory: Path) -> None:
    for steps, told in run_ranks(_paced_saves, 2, str(memory)):
        assert steps == [3, 3, 4, 4], "own slots and copies, of the last two saves"
        assert {kind for kind, _, _ in told} == {"memory_save_waited"}
        assert any(why == "its copy is sent" for _, why, _ in told), told
        assert max(waited_s for _, _, waited_s in told) > 0.1
