"""Does the workloads named on the command line, in order, and writes one JSON object a line.

`{"workload": NAME, "at": TEXT}` before something that may hang, then `"result"` or `"error"`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

from megascale.env import switch_multicast_off
from megascale.train.selfcheck import throttle  # counts from now on

WORKLOADS = ("gemm", "mesh", "replay", "all_to_all", "neighbours")


def main(argv: list[str]) -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    switch_multicast_off()
    for name, text in zip(argv[::2], argv[1::2], strict=True):
        if name not in WORKLOADS:
            sys.exit(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
        arguments = json.loads(text)
        fault = arguments.pop("fault", None)
        if fault == "hang":
            time.sleep(1e6)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)

        def tell(at: str, name: str = name) -> None:
            say({"workload": name, "at": at})

        try:
            tell("the import of torch")
            module = importlib.import_module(f"{throttle.__package__}.{name}")
            say({"workload": name, "result": module.run(arguments, tell)})
        except Exception as error:  # noqa: BLE001 - the process's border: told, and counted
            say({"workload": name, "error": f"{type(error).__name__}: {error}"[:1000]})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
