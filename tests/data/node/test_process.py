"""The loader as a process: what it reads, how it ends, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megascale.config import RunConfig, load_config
from megascale.data.loader import GlobalBatchLoader
from megascale.data.mixture import ShuffledSamples
from megascale.data.node import node as node_module
from megascale.data.node.filling import training_positions
from megascale.data.node.node import NodeLoader, available_bytes, start_of
from megascale.data.node.shape import RingShape
from megascale.data.node.source import NodeBatches, NodeMemory
from megascale.data.opening import open_order
from megascale.errors import ConfigError, DataError, LaunchError
from tests.data.test_samples import prepared_folder

SYNTHETIC = [
    "model.vocab_size=1000",
    "training.seq_len=16",
    "training.global_batch_size=8",
    "data.synthetic=true",
]


def _shape(slots: int = 3, dp_ranks: tuple[int, ...] = (0, 1), readers: int = 4) -> RingShape:
    return RingShape(slots, readers, dp_ranks, len(dp_ranks), 1, 8 // len(dp_ranks), 16, False)


@contextmanager
def _node(config: RunConfig, first: int = 0) -> Iterator[tuple[NodeLoader, list[NodeBatches]]]:
    """A loader, and four ranks (two tensor, two data) that are all in this process."""
    shape = _shape()
    loader = NodeLoader(config, [("train", shape)])
    memories = [
        NodeMemory(loader.place, [shape], range(4), deadline_s=30.0, ended=loader.ended)
        for _ in range(4)
    ]
    loader.seek(0, 1, first)
    ranks = [
        NodeBatches(
            memory,
            memory.rings[0],
            1,
            training_positions(config.training.global_batch_at, first),
            global_rank=rank,
            dp_rank=rank // 2,
        )
        for rank, memory in enumerate(memories)
    ]
    try:
        yield loader, ranks
    finally:
        for memory in memories:
            memory.close()
        loader.close()


def _take(source: NodeBatches, num: int) -> list[int]:
    return [next(source).first_sample for _ in range(num)]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.005)


def test_a_process_gives_what_ranks_would_read() -> None:
    config = load_config(None, SYNTHETIC)
    with _node(config, first=24) as (loader, ranks):
        assert "torch" not in Path(f"/proc/{loader.place.loader}/maps").read_text()
        for rank, source in enumerate(ranks):
            own = GlobalBatchLoader(
                open_order(config, "train"), micro_batch_size=1, dp_rank=rank // 2, dp_size=2,
                batch_size_at=config.training.global_batch_at, consumed_samples=24, prefetch=0,
            )  # fmt: skip
            for _ in range(2):
                got, expected = next(source), next(own)
                assert got.first_sample == expected.first_sample
                for a, b in zip(got.micro_batches, expected.micro_batches, strict=True):
                    assert a.windows_BW.tolist() == b.windows_BW.tolist()
                    assert a.loss_mask_BS.tolist() == b.loss_mask_BS.tolist()
                    assert a.sample_numbers_B.tolist() == b.sample_numbers_B.tolist()
            own.close()
        pid = loader.place.loader
    assert start_of(pid) is None, "it ends with its owner"


def test_ranks_of_a_node_map_the_same_pages() -> None:
    with _node(load_config(None, SYNTHETIC)) as (_, ranks):
        assert len({source._memory.inode for source in ranks}) == 1
        mapped = Path("/proc/self/maps").read_text()
        assert mapped.count("memfd:megascale-batches") >= 4
        same = [ranks[tp]._ring.share(0, ranks[tp]._share).windows_RW for tp in (0, 1)]
        next(ranks[0])
        assert same[0].tolist() == same[1].tolist()
        same[0][0, 0] += 1  # what one rank of a tensor group sees, the other sees
        assert same[1][0, 0] == same[0][0, 0]
        other = ranks[2]._ring.share(0, ranks[2]._share).windows_RW
        assert other[0].tolist() != same[0][0].tolist()
        del same, other


def test_a_loader_that_is_killed_is_named_to_every_rank() -> None:
    with _node(load_config(None, SYNTHETIC)) as (loader, ranks):
        for source in ranks:
            next(source)
        _until(lambda: all(source.is_ready() for source in ranks))
        os.kill(loader.place.loader, signal.SIGKILL)
        since = time.monotonic()
        for source in ranks:
            with pytest.raises(LaunchError, match=r"process \d+, which exited with -9\) is gone"):
                _take(source, 5)  # what is whole is still given out
        assert time.monotonic() - since < 5


def test_signals_that_stop_a_run_leave_its_loader() -> None:
    with _node(load_config(None, SYNTHETIC)) as (loader, ranks):
        next(ranks[0])
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(loader.place.loader, signum)
        for _ in range(4):
            for source in ranks[1:]:
                next(source)
            next(ranks[0])


_OWNER = """
import sys, time
from megascale.config import load_config
from megascale.data.node.node import NodeLoader
from tests.data.node.test_process import SYNTHETIC, _shape
loader = NodeLoader(load_config(None, SYNTHETIC), [("train", _shape())])
loader.seek(0, 1, 0)
print(loader.place.loader, flush=True)
time.sleep(60)
"""


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    before = sorted(os.listdir("/dev/shm"))
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    loader = int(owner.stdout.readline())
    assert start_of(loader) is not None
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _until(lambda: start_of(loader) is None)
    left = [name for name in set(os.listdir("/dev/shm")) - {*before} if "megascale" in name]
    assert not left


def test_too_little_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "available_bytes", lambda: 10_000)
    expected = (
        r"data.prefetch 2 with batches of 8 x 16 tokens needs 12.00KiB of shared memory on .*, "
        r"9.77KiB are available; lower data.prefetch"
    )
    with pytest.raises(ConfigError, match=expected):
        NodeLoader(load_config(None, SYNTHETIC), [("train", _shape())])


def test_memory_is_what_the_machine_and_the_control_group_leave(tmp_path: Path) -> None:
    for folder in ("proc/self", "sys/fs/cgroup/job", "sys/fs/cgroup/memory/old"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("4:cpu:/\n3:memory,x:/old\n0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000000\n")
    (group / "memory.stat").write_text("anon 300000\ninactive_file 700000\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("3000000\n")
    assert available_bytes(tmp_path) == 2_700_000  # what was read of files can be dropped
    for name, text in (
        ("limit_in_bytes", "900000\n"),
        ("usage_in_bytes", "500000\n"),
        ("stat", "total_inactive_file 100000\n"),
    ):
        (tmp_path / "sys/fs/cgroup/memory/old" / f"memory.{name}").write_text(text)
    assert available_bytes(tmp_path) == 500_000
    for name, text in (("max", "600000"), ("current", "700000"), ("stat", "")):
        (tmp_path / f"sys/fs/cgroup/memory.{name}").write_text(text)  # of a container
    assert available_bytes(tmp_path) == 0


def test_data_that_cannot_be_opened_is_told_in_its_words(tmp_path: Path) -> None:
    settings = [f"data.path={tmp_path}", "data.synthetic=false"]
    config = load_config(None, [*SYNTHETIC, *settings])
    with _node(config) as (_, ranks):
        for source in ranks:
            with pytest.raises(DataError, match=str(tmp_path)):
                next(source)


def test_a_damaged_token_is_told_to_every_rank_by_the_next_that_needs_it(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, [[*range(1, 100), 0]] * 20)
    settings = [f"data.path={folder}", "data.synthetic=false", "model.vocab_size=100"]
    config = load_config(None, [*SYNTHETIC, *settings])
    order = open_order(config, "train")
    assert isinstance(order, ShuffledSamples)
    sample = order.index(19)  # of the third batch
    tokens = np.memmap(folder / "train.bin", "<u2", "r+")
    tokens[16 * sample + 7] = 60_000
    tokens.flush()
    with _node(config) as (_, ranks):
        for source in ranks:
            assert _take(source, 2) == [0, 8]
            with pytest.raises(DataError, match=r"train.bin is damaged: token \d+ has id 60000"):
                next(source)
