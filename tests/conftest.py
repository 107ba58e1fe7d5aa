"""Tests marked `gpu` or `multi_gpu` are skipped, with the reason, where the devices are missing.

Under nohup the programs that tests start would rightly ignore the hangups that tests send. So who
runs tests has a handler in its place, which does as little and is not inherited.

One of several workers computes with one thread: threads that wait for each other on cores that
other workers have spin, and took four times the work of `tests/model` on two cores. OpenMP reads
its variable when torch is imported, so it is set before.
"""

from __future__ import annotations

import os
import signal

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

DEVICES_NEEDED = {"gpu": 1, "multi_gpu": 2}


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [
        (item, needed)
        for item in items
        for marker, needed in DEVICES_NEEDED.items()
        if item.get_closest_marker(marker)
    ]
    if not wanted:
        return
    import torch

    found = torch.cuda.device_count()
    for item, needed in wanted:
        if found < needed:
            reason = f"needs {needed} CUDA device(s), found {found}"
            item.add_marker(pytest.mark.skip(reason=reason))
