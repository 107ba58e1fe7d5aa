"""What goes wrong in the middle of a load is an error on all ranks, with who and where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import DamagedError, load, load_checkpoint, load_newest, save_checkpoint
from megascale.checkpoint.manifest import MANIFEST
from megascale.checkpoint.reading import shared_plan
from megascale.errors import CheckpointError, StorageError
from megascale.storage import BLOCK_BYTES
from tests.checkpoint.layouts import Layout, empty, reference, replicated, rows, whole
from tests.checkpoint.reading.saving import CountingFolder
from tests.distributed import forkserver, run_ranks

Plan = Callable[[int, str, int], None]
"""(rank, name, start): called before each read of data."""


def _save(rank: int, world_size: int, root: Path, step: int) -> None:
    save_checkpoint(root, step, rows(rank, world_size, reference()), {}, group=dist.group.WORLD)


def _load(
    rank: int, world_size: int, path: Path, layout: Layout, plan: Plan, patience_s: float
) -> tuple[str, str, float]:
    """(class of the error, its message, seconds)."""

    def before(name: str, start: int) -> None:
        if start:  # no header
            plan(rank, name, start)

    storage = CountingFolder(path.parent, before=before)
    pieces = layout(rank, world_size, empty())
    began_s = time.monotonic()
    try:
        with mock.patch.object(load, "opened", return_value=(storage, path.name)):
            load_checkpoint(path, pieces, group=dist.group.WORLD, patience_s=patience_s)
    except CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - began_s
    return "", "loaded", time.monotonic() - began_s


def _gone(rank: int, name: str, start: int) -> None:
    if rank == 2:
        raise StorageError(f"reading {name}: /mnt/runs is not there; mount it")


@pytest.mark.parametrize("layout", [rows, replicated])
def test_a_storage_that_vanishes_from_one_rank(tmp_path: Path, layout: Layout) -> None:
    run_ranks(_save, 4, tmp_path, 1)
    told = run_ranks(_load, 4, tmp_path / "step-00000001", layout, _gone, 30.0)
    text = (
        "rank 2 of 4: reading step-00000001/rank-00002.safetensors: /mnt/runs is not there; "
        "mount it"
    )
    for kind, message, seconds in told:
        assert kind == "CheckpointError"  # nothing older is tried where the storage fails
        assert message == text
        assert seconds < 10


def _nothing(rank: int, name: str, start: int) -> None:
    pass


@pytest.mark.parametrize("layout", [rows, replicated])
def test_a_flipped_bit_is_damage_on_all_ranks(tmp_path: Path, layout: Layout) -> None:
    run_ranks(_save, 4, tmp_path, 1)
    path = tmp_path / "step-00000001"
    _flip_last_byte(path / "rank-00003.safetensors")
    told = run_ranks(_load, 4, path, layout, _nothing, 30.0)
    assert len({message for _, message, _ in told}) == 1
    for kind, message, _ in told:
        assert kind == "DamagedError"
        assert f"{path}/rank-00003.safetensors: bytes 4,096 to" in message
        assert "use another checkpoint" in message


def test_damage_in_a_header(tmp_path: Path) -> None:
    run_ranks(_save, 4, tmp_path, 1)
    path = tmp_path / "step-00000001"
    with (path / "rank-00001.safetensors").open("r+b") as file:
        file.seek(100)
        file.write(b"?")
    told = run_ranks(_load, 4, path, rows, _nothing, 30.0)
    for kind, message, _ in told:
        assert kind == "DamagedError"
        assert message.startswith("rank 1 of 4:")
        assert "bytes 0 to 4,096" in message


def _killed(rank: int, name: str, start: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _stopped(rank: int, name: str, start: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def _hanging(rank: int, name: str, start: int) -> None:
    if rank == 1:
        time.sleep(20)


def _load_and_tell(
    rank: int, store: str, path: Path, layout: Layout, plan: Plan, told: Path
) -> None:
    """Through a file, and then waits: who ends closes connections that others listen to."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    kind, message, seconds = _load(rank, 4, path, layout, plan, 4.0)
    (told / f"part-{rank}").write_text(f"{seconds:.3f} {kind}: {message}")
    (told / f"part-{rank}").rename(told / f"rank-{rank}")
    while True:
        time.sleep(1)


@pytest.mark.full
@pytest.mark.parametrize("layout", [rows, replicated])
@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (_killed, "rank 1 of 4 is gone (its connection was closed)"),
        (_stopped, "rank 1 of 4 said nothing for"),
        (_hanging, "rank 1 of 4: {path}/rank-00001.safetensors was not read in time"),
    ],
    ids=["killed", "stopped", "hanging"],
)
def test_a_rank_that_is_gone_is_named_by_the_others(
    tmp_path: Path, layout: Layout, plan: Plan, what: str
) -> None:
    run_ranks(_save, 4, tmp_path, 1)
    path, told = tmp_path / "step-00000001", tmp_path / "told"
    told.mkdir()
    ranks = [
        forkserver.Process(
            target=_load_and_tell,
            args=(rank, str(tmp_path / "store"), path, layout, plan, told),
        )
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    answers = [told / f"rank-{rank}" for rank in (0, 2, 3)]
    deadline_s = time.monotonic() + 40
    while not all(answer.exists() for answer in answers) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for process in ranks:
        process.kill()
        process.join()
    for answer in answers:
        seconds, kind, message = answer.read_text().split(" ", 2)
        assert float(seconds) < 15
        assert kind == "CheckpointError:"
        assert what.format(path=path) in message


def _die_planning(rank: int, store: str, path: Path, told: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    make_plan = shared_plan.make_plan

    def die(*arguments: Any) -> Any:
        if rank == 1:
            time.sleep(0.3)  # the others wait for it
            os.kill(os.getpid(), signal.SIGKILL)
        return make_plan(*arguments)

    with mock.patch.object(shared_plan, "make_plan", die):
        try:
            load_checkpoint(path, rows(rank, 4, empty()), group=dist.group.WORLD)
        except CheckpointError as error:
            (told / f"rank-{rank}").write_text(str(error))
    time.sleep(0.5)  # who ends closes connections, also of those that wait for it alone


def test_a_rank_that_dies_while_the_load_is_planned_is_named(tmp_path: Path) -> None:
    run_ranks(_save, 4, tmp_path, 1)
    path, told = tmp_path / "step-00000001", tmp_path / "told"
    told.mkdir()
    ranks = [
        forkserver.Process(target=_die_planning, args=(rank, str(tmp_path / "store"), path, told))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30.0)
        process.kill()
        process.join()
    messages = [(told / f"rank-{rank}").read_text() for rank in (0, 2, 3)]
    assert all(message.startswith(f"loading {path}: ") for message in messages), messages
    named = "rank 1 of 4 is gone (its connection was closed)"
    assert all(named in message for message in messages), messages
    assert any(message.count(" is gone") == 1 for message in messages), messages


def test_the_next_older_one_is_loaded_where_the_newest_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        run_ranks(_save, 2, tmp_path, step)
    _flip_last_byte(tmp_path / "step-00000003" / "rank-00001.safetensors")
    (tmp_path / "step-00000002" / "rank-00000.safetensors").unlink()
    tensors = empty()
    seen: list[str] = []
    loaded = load_newest(
        tmp_path,
        [whole(key, tensor) for key, tensor in tensors.items()],
        accept=lambda path, _meta: seen.append(Path(path).name),
    )
    assert loaded is not None
    assert (loaded.path, loaded.step) == (tmp_path / "step-00000001", 1)
    assert all(torch.equal(tensor, reference()[key]) for key, tensor in tensors.items())
    assert seen == ["step-00000003", "step-00000001"]
    assert "skipping a corrupt checkpoint" in caplog.text
    assert "rank-00000.safetensors is missing" in caplog.text


def _load_newest(rank: int, world_size: int, root: Path) -> tuple[str, list[str]]:
    pieces = replicated(rank, world_size, empty())
    loaded = load_newest(root, pieces, group=dist.group.WORLD)
    assert loaded is not None
    wanted = reference()
    return str(loaded.path), [p.key for p in pieces if not torch.equal(p.tensor, wanted[p.key])]


def test_ranks_go_on_to_the_next_older_one_together(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_ranks(_save, 4, tmp_path, step)
    _flip_last_byte(tmp_path / "step-00000003" / "rank-00001.safetensors")
    _flip_last_byte(tmp_path / "step-00000002" / "rank-00003.safetensors")
    told = run_ranks(_load_newest, 3, tmp_path)
    assert told == [(str(tmp_path / "step-00000001"), [])] * 3


def test_what_is_not_accepted_is_not_passed_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, [whole("master/a", torch.ones(3))], {"model": "other"})

    def accept(path: object, meta: dict[str, object]) -> None:
        raise CheckpointError(f"another model: {meta['model']}")

    with pytest.raises(CheckpointError, match="another model: other"):
        load_newest(tmp_path, [whole("master/a", torch.zeros(3))], accept=accept)


def test_none_is_whole(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, [whole("master/a", torch.ones(3))], {})
    (path / MANIFEST).write_bytes(b"{}")
    assert load_newest(tmp_path, [whole("master/a", torch.zeros(3))]) is None


def test_a_large_file_is_damaged_in_one_block_and_says_which(tmp_path: Path) -> None:
    tensor = torch.arange(5 * BLOCK_BYTES // 8, dtype=torch.int64)
    path = save_checkpoint(tmp_path, 1, [whole("count/a", tensor)], {})
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.seek(4096 + 3 * BLOCK_BYTES + 77)
        file.write(b"\x55")
    with pytest.raises(DamagedError, match=r"bytes 50,335,744 to 67,112,960 have SHA-256"):
        load_checkpoint(path, [whole("count/a", torch.zeros_like(tensor))])


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
