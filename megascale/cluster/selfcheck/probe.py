"""The checks without torch, in a process that can be ended: `python -m ...probe NAME JSON ...`.

A dead file server hangs `statvfs`, a sick driver hangs NVML. What it writes: `process.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from megascale.cluster.selfcheck.host import read_host
from megascale.cluster.selfcheck.memory import copy_rates
from megascale.cluster.selfcheck.nvml import read_gpus

WORKLOADS: Mapping[str, Callable[[Mapping[str, Any], Callable[[str], None]], dict[str, Any]]] = {
    "host": read_host,
    "gpus": read_gpus,
    "memory": copy_rates,
}


def main(argv: list[str]) -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    for name, text in zip(argv[::2], argv[1::2], strict=True):
        arguments = json.loads(text)
        fall_ill(arguments.pop("fault", None))

        def tell(at: str, name: str = name) -> None:
            say({"workload": name, "at": at})

        try:
            say({"workload": name, "result": WORKLOADS[name](arguments, tell)})
        except Exception as error:  # noqa: BLE001 - the process's border: told, and counted
            say({"workload": name, "error": f"{type(error).__name__}: {error}"})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def fall_ill(fault: str | None) -> None:
    """The faults that any workload can have on purpose."""
    if fault == "hang":
        time.sleep(1e6)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
