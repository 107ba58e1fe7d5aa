"""Tests marked `gpu` or `multi_gpu` are skipped, with the reason, where the devices are missing.

What the shell said about hangups is forgotten: under nohup the programs that tests start would
rightly ignore the signals that the tests send.
"""

from __future__ import annotations

import signal

import pytest

DEVICES_NEEDED = {"gpu": 1, "multi_gpu": 2}


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
