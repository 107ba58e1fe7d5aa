"""Becomes a rank: ties this process to the agent, then executes the rank's command.

    python -I -S birth.py AGENT_PID COMMAND ...

A program of its own and not code between fork and exec: the agent has threads, and a lock that one
of them holds at the fork would be held for ever in the child. Only the standard library is here,
about 30 ms. SIGKILL when the agent dies stays set over exec; its children do not inherit it, which
is what the watchdog is for. Under memory pressure the kernel takes a rank before the agent.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_NO_PARENT, EXIT_NO_PROGRAM = 126, 127


def main(agent_pid: int, command: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:  # it died before the line above
        os._exit(EXIT_NO_PARENT)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"LaunchError: {command[0]} cannot be executed: {error.strerror}", file=sys.stderr)
        os._exit(EXIT_NO_PROGRAM)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
