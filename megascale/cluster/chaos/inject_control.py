"""Injectors for the control plane: drivers that die or are two, nonsense asked, bad spares."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time

from megascale.cluster.agent.proc import send
from megascale.cluster.chaos.inject import WAIT_S, Hit, Target, await_for
from megascale.cluster.chaos.live import LiveJob


def driver_and_node(job: LiveJob, target: Target) -> Hit:
    """A node dies while there is no driver."""
    node = job.node_of(target.node or 0)
    job.driver.send_signal(signal.SIGKILL)
    job.driver.wait(10.0)
    job.lose_power(node)
    time.sleep(float(target.options["seconds"]))
    job.start_driver()
    return Hit(time.monotonic(), node=node)


def driver_kill(job: LiveJob, target: Target) -> Hit:
    """SIGKILL; the same command again after `seconds`."""
    hit = Hit(time.monotonic())
    job.driver.send_signal(signal.SIGKILL)
    job.driver.wait(10.0)
    time.sleep(float(target.options["seconds"]))
    back_s = time.monotonic()
    job.start_driver()
    if _await_readoption(job):
        hit.said["readopted_s"] = round(time.monotonic() - back_s, 3)
    return hit


def _await_readoption(job: LiveJob) -> bool:
    """Until the driver has heard every node that has ranks: its silence got shorter."""
    deadline_s, heard = time.monotonic() + WAIT_S, set[str]()
    last: dict[str, float] = {}
    while time.monotonic() < deadline_s:
        nodes = [n for n in (job.status() or {}).get("nodes", []) if n["node_rank"] is not None]
        for node in nodes:
            if node["silence_s"] < last.get(node["node"], 0.0):
                heard.add(node["node"])
            last[node["node"]] = node["silence_s"]
        if nodes and heard >= {node["node"] for node in nodes}:
            return True
        time.sleep(0.05)
    return False


def second_driver(job: LiveJob, _target: Target) -> Hit:
    """The same command while the driver lives: it must refuse to be one."""
    hit = Hit(time.monotonic())
    second = job.start_driver()
    job.drivers.remove(second)
    try:
        hit.said["exit_code"] = second.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        second.kill()
        hit.said["exit_code"] = None
    return hit


def fuzz(job: LiveJob, target: Target) -> Hit:
    """Requests without a right token, and with it but without sense."""
    rng, hit = random.Random(target.seed), Hit(time.monotonic())
    paths = ["/v1/join", "/v1/heartbeat", "/v1/results", "/v1/commands", "/v1/evict", "/v1/stop"]
    answers: dict[int, int] = {}
    for number in range(int(target.options["requests"])):
        path = paths[number % len(paths)]
        right = number % 2 and path not in ("/v1/stop",)
        body = _nonsense(rng)
        method = "GET" if path == "/v1/commands" else "POST"
        code, _ = job.call(method, path, body, token=None if right else _word(rng))
        answers[code] = answers.get(code, 0) + 1
    hit.said["answers"] = answers
    return hit


def bad_spare(job: LiveJob, _target: Target) -> Hit:
    """The spare is given back, and the one that comes for it fails its self-check."""
    spare = await_for(job.spare, "a spare (job.spares of the schedule)")
    job.rig.next_agent.write_text(json.dumps({"selfcheck_fault": "memory"}))
    hit = Hit(time.monotonic())
    job.call("POST", "/v1/evict", {"node": spare, "reason": "chaos", "block": False})
    try:
        taken = await_for(
            lambda: sorted((job.rig.folder / "hosts").glob("*/taken.json")), "an agent in its place"
        )
    finally:
        job.rig.next_agent.unlink(missing_ok=True)
    host = taken[-1].parent.name
    taken[-1].unlink()
    machines = job.register()["machines"]
    hit.node = next((name for name, one in machines.items() if one["host"] == host), host)
    return hit


def spare_kill(job: LiveJob, _target: Target) -> Hit:
    spare = await_for(job.spare, "a spare (job.spares of the schedule)")
    hit = Hit(time.monotonic(), node=spare)
    send(job.agent(spare), signal.SIGKILL)
    return hit


def _nonsense(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return os.urandom(rng.randrange(1, 200))
    if kind == 1:
        return b'{"version": 1, "node": "' + b"n" * rng.randrange(1, 5000) + b'"}'
    if kind == 2:
        return json.dumps({"node": "node0", "incarnation": _word(rng), "epoch": -1}).encode()
    return b"[" * rng.randrange(1, 2000)


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefgh0123") for _ in range(12))
