"""An interpreter that has imported what a rank needs, and forks one whenever it is asked.

    python -m megascale.train.template SOCKET_FD MODULE ...

One import a node in place of one a rank: 1.9 s of a CPU each. A fork takes 10 to 20 ms, and what
was imported is in memory once. A child waits as `train/warm.py` does, is told what to be, and
becomes that; it is the agent's child (it is forked twice, and the agent adopts orphans), leads a
session, and is killed when the agent dies. MODULE: what else a child may be told to run.

One datagram a message, over a socket of the agent's:

    says    {"forks": true, "why": ""}, or {"forks": false, "why": TEXT}    once, after its imports
    is told {"local_rank": N, "log": PATH} and one descriptor: the child's standard input
    says    {"pid": PID}, or {"error": TEXT}; or as at first {"forks": false, "why": TEXT}

Safe to fork: one thread, so that no lock is held by one that the child has not (the threads of
OpenMP, autograd and gloo begin at their first use, which is the child's); and no GPU opened, for a
CUDA context does not survive a fork. Both are looked at, in /proc, before it says that it forks and
again before each fork. Where they do not hold, nothing is forked and the agent is told why. What
children of one template have in common: the seed of Python's hashes. Generators of random numbers
are seeded anew.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from megascale.train import warm

# `torch.use_deterministic_algorithms` imports it: 0.5 s of a self-check's replay.
MORE = ("torch._inductor.config",)
ADOPTED_S = 10.0
EXIT_NO_PARENT = 126
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MESSAGE_BYTES = 1 << 16


class _NotSafeError(OSError):
    """This process must not be forked any more."""


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    agent_pid, oom_score = os.getppid(), warm.be_expendable()
    warm.import_all(0)  # what local rank 0 needs beside is in it
    for name in (*MORE, *sys.argv[2:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children copy no page for a mark of the collector
    why = why_not()
    channel.send(json.dumps({"forks": not why, "why": why}).encode())
    if why or not serve(channel, agent_pid):
        return
    channel.close()
    warm.become_what_is_told(oom_score)


def why_not() -> str:
    """Why a fork of this process would not be safe; empty where it is."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"it has {threads} threads after its imports"
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            device = os.readlink(f"/proc/self/fd/{name}")
            if device.startswith("/dev/nvidia"):
                return f"it has opened {device}"
    return ""


def serve(channel: socket.socket, agent_pid: int) -> bool:
    """Fork for each request. True in a child; False when the agent has closed the socket."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
        if not message:
            return False
        try:
            pid = _fork(descriptors[0], json.loads(message)["log"], agent_pid)
        except _NotSafeError as error:
            channel.send(json.dumps({"forks": False, "why": str(error)}).encode())
        except OSError as error:
            channel.send(json.dumps({"error": str(error)}).encode())
        else:
            if pid == 0:
                return True
            channel.send(json.dumps({"pid": pid}).encode())
        finally:
            for descriptor in descriptors:
                with suppress(OSError):  # the child has made it its standard input
                    os.close(descriptor)


def _fork(orders: int, log: str, agent_pid: int) -> int:
    """The child's pid; 0 in the child. Raises OSError."""
    why = why_not()
    if why:
        raise _NotSafeError(why)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    theirs, ours = os.pipe()
    between = os.fork()
    if between:
        os.close(ours)
        with os.fdopen(theirs, "rb") as told:
            text = told.read()  # ends when the one between does: the child closes its end at once
        os.waitpid(between, 0)
        if not text.isdigit():
            raise OSError("not forked: the process between ended")
        return int(text)
    os.close(theirs)
    between = os.getpid()
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os.write(ours, str(child).encode())
        os._exit(0)
    os.close(ours)
    try:
        _settle(orders, log, between, agent_pid)
    except BaseException:  # noqa: BLE001 - this is the child: it must not answer for the template
        os._exit(1)
    return 0


def _settle(orders: int, log: str, between: int, agent_pid: int) -> None:
    """Be the agent's child, in a session of its own, with the standard streams of one."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor, standard in ((orders, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.close(output)
    give_up_s = time.monotonic() + ADOPTED_S
    while os.getppid() == between and time.monotonic() < give_up_s:
        select.select([], [], [], 0.001)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:  # it died, or adopts nobody
        os._exit(EXIT_NO_PARENT)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    main()
