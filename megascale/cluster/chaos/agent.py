"""`python -m megascale.cluster.chaos.agent`: the agent itself, over the files of its host's rig.

The arguments are the agent's; --host-name and --run-dir say which rig. What the environment must
have is there from the beginning of the process: it is executed a second time with it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from megascale.cluster.agent.__main__ import main as agent_main
from megascale.cluster.chaos.rig import Host, Rig
from megascale.env import SELFCHECK_FAULT, child_environment

AGAIN = "--again"
LOOK_S = 0.2  # at the clock's file


def put_clock_forward(host: Host) -> None:
    """This process's wall clock is what the host's file says; the monotonic one stays."""
    real, real_ns, state = time.time, time.time_ns, {"at_s": 0.0, "offset_s": 0.0}

    def offset_s() -> float:
        now_s = time.monotonic()
        if now_s - state["at_s"] > LOOK_S:
            state["at_s"] = now_s
            try:
                state["offset_s"] = float(host.clock.read_text())
            except (OSError, ValueError):
                state["offset_s"] = 0.0
        return state["offset_s"]

    time.time = lambda: real() + offset_s()
    time.time_ns = lambda: real_ns() + int(offset_s() * 1e9)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host-name", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--driver", required=True)
    known, _ = parser.parse_known_args([word for word in arguments if word != AGAIN])
    rig = Rig(known.run_dir)
    host = rig.host(known.host_name)
    if AGAIN not in arguments:
        host.make(own_network="//127." not in known.driver)
        fault = rig.take_next(known.host_name).get("selfcheck_fault")
        more = {SELFCHECK_FAULT: fault} if fault else {}
        command = [sys.executable, "-m", "megascale.cluster.chaos.agent", AGAIN, *arguments]
        os.execve(sys.executable, command, child_environment(more))
    put_clock_forward(host)
    rigged = ["--fake-devices", str(host.devices), "--sys-root", str(host.sys)]
    rigged += ["--kernel-log", str(host.kernel_log)]
    return agent_main([word for word in arguments if word != AGAIN] + rigged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
