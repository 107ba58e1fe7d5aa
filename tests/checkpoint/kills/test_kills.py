"""Killed with SIGKILL at 200 seeded instants during saves, and at every point of one: the newest
complete state always loads, bitwise, and no save was left out."""

from __future__ import annotations

import gc
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.kills.campaign import Campaign
from tests.distributed import forkserver


def _enter(fn: Callable[..., Any], args: tuple[Any, ...], pipe: Any) -> None:
    gc.freeze()  # as in tests/distributed.py
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((fn(*args), ""))
    except BaseException:  # noqa: BLE001 - the edge of the process: whatever it was is reported
        pipe.send((None, traceback.format_exc()))


def _in_a_warm_process(fn: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=_enter, args=(fn, args, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(timeout_s), f"no word in {timeout_s} s"
        result, failure = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert not failure, failure
    return result


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on tmpfs."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def _instants(folder: Path, world_size: int, seed: int, num_kills: int) -> Counter[str]:
    campaign = Campaign(folder, world_size, seed)
    for number in range(num_kills):
        campaign.kill_at_an_instant()
        if number % 10 == 9:
            campaign.lose_memory()
    campaign.end()
    return campaign.outcomes


def _points(folder: Path, is_behind: bool) -> Counter[str]:
    campaign = Campaign(folder, 1, 0)
    point = 1
    while campaign.kill_at_point(point, is_behind=is_behind):
        point += 1
    campaign.end()
    return campaign.outcomes


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_at_a_few_instants(memory: Path, world_size: int) -> None:
    outcomes = _in_a_warm_process(_instants, memory, world_size, 7, 5, timeout_s=60)
    assert outcomes["kills"] == 5


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world_size", "num_kills"), [(1, 150), (2, 50)])
def test_killed_at_200_instants(memory: Path, world_size: int, num_kills: int) -> None:
    outcomes = _in_a_warm_process(_instants, memory, world_size, 1, num_kills, timeout_s=280)
    print(outcomes)
    assert outcomes["kills"] == num_kills
    # The instants do lie inside of saves, and on both sides of the moment from which they count.
    assert outcomes["memory"] > num_kills / 5
    assert outcomes["disk"] > num_kills / 5
    assert num_kills / 20 < outcomes["saves that counted"] < num_kills


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_behind", [False, True])
def test_killed_at_every_point_of_a_save(memory: Path, is_behind: bool) -> None:
    outcomes = _in_a_warm_process(_points, memory, is_behind, timeout_s=280)
    print(outcomes)
    assert outcomes["points"] > 30
