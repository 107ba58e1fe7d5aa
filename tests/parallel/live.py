"""How much memory tensors really hold: the storages behind all live tensors of this process."""

from __future__ import annotations

import gc
import time

import torch


def forget_live_tensors() -> None:
    """Count from here: what is alive now is left out from now on (and never collected)."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Bytes of the distinct CPU storages of every tensor made since `forget_live_tensors`.

    The least of several looks: gloo's threads let go of a finished collective's tensors a little
    after whoever waited for it goes on.
    """
    looks = [_look()]
    for _ in range(4):
        time.sleep(0.05)
        looks.append(_look())
    return min(looks)


def _look() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
