"""Saves behind training: committed whole or told, one at a time, none left out."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import (
    BackgroundSaves,
    Saved,
    SaveFailed,
    digest_pieces,
    find_latest,
    load_checkpoint,
    read_meta,
    verify,
)
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.digest import added, as_hex
from megascale.checkpoint.manifest import list_checkpoints, read_manifest
from megascale.checkpoint.pieces import Piece
from megascale.errors import CheckpointError, StorageError
from megascale.storage import FileJob, FileWriter, Written
from tests.checkpoint.layouts import empty, flat_ranges, reference, replicated, rows, whole
from tests.checkpoint.staging import Held
from tests.distributed import run_ranks


@pytest.fixture(scope="module")
def writer() -> Iterator[FileWriter]:
    with FileWriter(stall_s=20) as writer:
        yield writer


def _pieces(step: int) -> list[Piece]:
    return [whole("master/a", torch.full((300,), float(step)))]


def _loaded_step(path: Path) -> float:
    tensor = torch.zeros(300)
    load_checkpoint(path, [whole("master/a", tensor)])
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


class Gated:
    """A writer that waits to be let through, or fails."""

    def __init__(self, writer: FileWriter, failure: StorageError | None = None) -> None:
        self._writer, self._failure = writer, failure
        self.gate = threading.Event()

    def write(self, job: FileJob, moved: Callable[[int], None] = lambda _: None) -> Written:
        assert self.gate.wait(30)
        if self._failure is not None:
            raise self._failure
        return self._writer.write(job, moved)


def test_it_is_written_and_committed_behind(tmp_path: Path, writer: FileWriter) -> None:
    gated, moved = Gated(writer), list[None]()
    saves = BackgroundSaves(tmp_path, Ranks(None), gated, moved=lambda: moved.append(None))
    held = Held(tmp_path / "slot", _pieces(4))
    saves.start(held.staged(4), {"seed": 3})
    assert saves.is_busy
    assert saves.finished() == []
    assert list_checkpoints(tmp_path).committed == []
    gated.gate.set()
    saves.join()
    (ended,) = saves.finished()
    assert isinstance(ended, Saved)
    assert (ended.step, ended.path, ended.num_bytes) == (4, tmp_path / "step-00000004", 1200)
    assert held.released.is_set()
    assert moved
    assert saves.finished() == []
    assert read_meta(tmp_path / "step-00000004") == {"seed": 3, "step": 4}
    verify(tmp_path / "step-00000004")
    assert _loaded_step(tmp_path / "step-00000004") == 4.0
    saves.close()


def test_one_that_is_due_while_one_is_under_way_waits(tmp_path: Path, writer: FileWriter) -> None:
    gated = Gated(writer)
    saves = BackgroundSaves(tmp_path, Ranks(None), gated)
    helds = [Held(tmp_path / f"slot{step}", _pieces(step)) for step in (1, 2)]
    saves.start(helds[0].staged(1), {})
    threading.Timer(0.2, gated.gate.set).start()
    before_s = time.monotonic()
    saves.start(helds[1].staged(2), {})
    assert time.monotonic() - before_s > 0.1
    saves.close()
    assert [ended.step for ended in saves.finished() if isinstance(ended, Saved)] == [1, 2]
    assert [_loaded_step(tmp_path / f"step-0000000{step}") for step in (1, 2)] == [1.0, 2.0]


@pytest.mark.parametrize("own", [True, False])
def test_digests_are_of_what_is_staged(tmp_path: Path, writer: FileWriter, own: bool) -> None:
    pieces = [whole(key, tensor) for key, tensor in reference().items()]
    wanted = digest_pieces(pieces)
    saves = BackgroundSaves(tmp_path, Ranks(None), writer)
    made = (lambda: wanted) if own else None
    saves.start(Held(tmp_path / "slot", pieces).staged(1), {}, digests=made)
    saves.close()
    assert read_manifest(tmp_path / "step-00000001").digests == as_hex(wanted)


def _roll_back() -> None:
    raise CheckpointError("step 2 was rolled back")


def test_a_state_that_was_rolled_back_makes_no_folder(tmp_path: Path, writer: FileWriter) -> None:
    saves = BackgroundSaves(tmp_path / "root", Ranks(None), writer)
    held = Held(tmp_path / "slot", _pieces(2), wait=_roll_back)
    saves.start(held.staged(2), {})
    saves.join()
    assert saves.finished() == [SaveFailed(2, "step 2 was rolled back")]
    assert held.released.is_set()
    assert not (tmp_path / "root").exists()


def test_what_fails_is_told_and_the_next_save_works(tmp_path: Path, writer: FileWriter) -> None:
    gated = Gated(writer, StorageError("writing x: no progress for 60 s"))
    gated.gate.set()
    saves = BackgroundSaves(tmp_path / "root", Ranks(None), gated)
    helds = [Held(tmp_path / f"slot{step}", _pieces(step)) for step in (1, 2)]
    saves.start(helds[0].staged(1), {})
    saves.join()
    assert list((tmp_path / "root").iterdir()) == []
    gated._failure = None
    saves.start(helds[1].staged(2), {})
    saves.close()
    failed, saved = saves.finished()
    assert failed == SaveFailed(1, "writing x: no progress for 60 s")
    assert isinstance(saved, Saved)
    assert all(held.released.is_set() for held in helds)
    assert find_latest(tmp_path / "root") == tmp_path / "root" / "step-00000002"


def test_a_trainer_that_no_longer_may_does_not_commit(tmp_path: Path, writer: FileWriter) -> None:
    def refuse() -> None:
        raise CheckpointError("the driver has started epoch 3")

    saves = BackgroundSaves(tmp_path / "root", Ranks(None), writer, fence=refuse)
    saves.start(Held(tmp_path / "slot", _pieces(1)).staged(1), {})
    saves.close()
    assert saves.finished() == [SaveFailed(1, "the driver has started epoch 3")]
    assert list((tmp_path / "root").iterdir()) == []


def test_a_writer_that_is_killed_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    with FileWriter() as writer:
        saves = BackgroundSaves(tmp_path / "root", Ranks(None), writer)
        saves.start(Held(tmp_path / "slot1", _pieces(1)).staged(1), {})
        saves.join()
        gated = Gated(writer)
        again = BackgroundSaves(tmp_path / "root", Ranks(None), gated)
        pid = writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        again.start(Held(tmp_path / "slot2", _pieces(2)).staged(2), {})
        gated.gate.set()
        time.sleep(0.2)  # it has the job
        os.kill(pid, signal.SIGKILL)
        again.close()
        (failed,) = again.finished()
        assert isinstance(failed, SaveFailed)
        assert "step-00000002/rank-00000.safetensors" in failed.reason
        assert find_latest(tmp_path / "root") == tmp_path / "root" / "step-00000001"
        saves.start(Held(tmp_path / "slot3", _pieces(3)).staged(3), {})  # by another process
        saves.close()
        assert _loaded_step(tmp_path / "root" / "step-00000003") == 3.0


def _save_on_ranks(rank: int, world_size: int, folder: str) -> tuple[list[str], dict[str, str]]:
    """Three saves: of one layout, of one that does not tile, and of another."""
    root = Path(folder) / "root"
    with FileWriter() as writer:
        saves = BackgroundSaves(root, Ranks(dist.group.WORLD), writer)
        for step, layout in ((1, rows), (2, replicated), (3, flat_ranges)):
            held = Held(Path(folder) / f"{rank}.{step}", layout(rank, world_size, reference()))
            saves.start(held.staged(step), {"rank": rank})
        saves.close()
    ended = [
        f"{end.step} {getattr(end, 'path', '')}" if isinstance(end, Saved) else end.reason
        for end in saves.finished()
    ]
    tensors = empty()
    pieces = [whole(key, tensor) for key, tensor in tensors.items()]
    load_checkpoint(root / "step-00000003", pieces, group=dist.group.WORLD)
    assert all(torch.equal(tensors[key], value) for key, value in reference().items())
    return ended, read_manifest(root / "step-00000003").digests


def test_ranks_save_together_and_fail_together(tmp_path: Path) -> None:
    wanted = as_hex(added([digest_pieces(replicated(0, 1, reference()))]))
    for (first, second, third), digests in run_ranks(_save_on_ranks, 2, str(tmp_path)):
        assert first == f"1 {tmp_path}/root/step-00000001"
        assert "are both written" in second
        assert third == f"3 {tmp_path}/root/step-00000003"
        assert digests == wanted


def _die_behind(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 is gone when its file is to be written."""

    class Dying:
        def write(self, job: FileJob, moved: Callable[[int], None] = lambda _: None) -> Written:
            os._exit(9)

    with FileWriter() as writer:
        saves = BackgroundSaves(
            Path(folder), Ranks(dist.group.WORLD), Dying() if rank == 1 else writer
        )
        held = Held(Path(folder) / f"slot{rank}", rows(rank, world_size, reference()))
        saves.start(held.staged(2), {})
        saves.close()


def test_a_rank_that_dies_behind_training_leaves_no_mark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError, match=r"died without a word|failed"):
        run_ranks(_die_behind, 2, str(tmp_path))
    assert find_latest(tmp_path) is None
    assert "step-00000002: no commit mark" in caplog.text


def _break_the_group() -> None:
    raise RuntimeError("Connection closed by peer [::1]. This is typically caused by a worker")


def test_a_rank_that_is_gone_is_said(tmp_path: Path, writer: FileWriter) -> None:
    class Broken(Ranks):
        def gather(self, part: Callable[[], object]) -> Any:
            return _break_the_group()

    saves = BackgroundSaves(tmp_path, Broken(None), writer)
    held = Held(tmp_path / "slot", _pieces(1))
    saves.start(held.staged(1), {})
    saves.close()
    (failed,) = saves.finished()
    assert isinstance(failed, SaveFailed)
    assert "another rank is gone" in failed.reason
    assert failed.reason.endswith("(Connection closed by peer [::1])")
    assert held.released.is_set()
