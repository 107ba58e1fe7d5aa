"""What `open_recorder` starts beside the recorder, and that it ends with it."""

from __future__ import annotations

import gc
import threading
import time
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from megascale.config import load_config
from megascale.env import RankEnvironment, free_port
from megascale.telemetry.recorder import NullRecorder, Recorder
from megascale.topology import Mesh
from megascale.train.recording import open_recorder
from megascale.train.run_folder import RunFolder


def _open(folder: Path, rank: RankEnvironment, *settings: str) -> AbstractContextManager[Recorder]:
    config = load_config(None, [f"job.run_dir={folder}", *settings])
    mesh = Mesh(1, rank.world_size, 1)
    return open_recorder(config, rank, mesh, torch.device("cpu"), RunFolder(folder), [])


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_threads_end_with_the_recorder(tmp_path: Path) -> None:
    ours = {"deadline of collectives", "monitor requests"}
    others = list(gc.callbacks)  # of a test runner's own
    with _open(tmp_path, RankEnvironment(2, 4, 0, 2)):
        assert ours <= _threads()
    assert not ours & _threads()
    assert gc.callbacks == others
    with _open(tmp_path, RankEnvironment(3, 4, 1, 2)):
        assert ours & _threads() == {"deadline of collectives"}, "one rank works for the node"
    with _open(tmp_path, RankEnvironment()):
        assert ours & _threads() == {"monitor requests"}, "a world of one has no collectives"


def test_nothing_is_started_where_nothing_is_recorded(tmp_path: Path) -> None:
    before = _threads()
    with _open(tmp_path, RankEnvironment(0, 2, 0, 2), "telemetry.enable=false") as recorder:
        assert isinstance(recorder, NullRecorder)
        assert _threads() == before


@pytest.mark.full
def test_the_endpoint_of_the_node(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with _open(tmp_path, RankEnvironment(), f"telemetry.prometheus_port={port}") as recorder:
        with recorder.step(3):
            pass
        give_up_s = time.monotonic() + 30
        while 'megascale_step{rank="0"} 3.0' not in _scraped(url):
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
    assert _scraped(url) == ""


def _scraped(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
