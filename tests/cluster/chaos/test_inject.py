"""Injectors on a job that stands still: what they order, write, ask for and signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.agent.proc import read_stat
from megascale.cluster.chaos import inject, inject_control
from megascale.cluster.chaos.faults import KINDS
from megascale.cluster.chaos.inject import Target
from megascale.cluster.chaos.live import JobSpec, LiveJob, RankNow


class Still(LiveJob):
    """Two nodes of two ranks; each rank is a process that sleeps. Requests are written down."""

    def __init__(self, folder: Path, pids: list[int]) -> None:
        super().__init__(JobSpec(Path("r.toml"), (), folder, 2, 2, 1))
        self.pids, self.asked = pids, list[tuple[str, Any, str | None]]()
        self.rig.folder.mkdir(parents=True)
        for host in ("node0", "node1"):
            self.rig.host(host).make()

    def ranks(self) -> dict[int, RankNow]:
        found = {}
        for rank, pid in enumerate(self.pids):
            stat = read_stat(pid)
            assert stat is not None
            step = 30 + rank
            found[rank] = RankNow(rank, 1, stat.identity, f"n{rank // 2}", step, "forward")
        return found

    def node_of(self, node_rank: int) -> str:
        return f"n{node_rank}"

    def host(self, node: str) -> str:
        return node.replace("n", "node")

    def call(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:
        self.asked.append((path, body, token))
        return (422 if token is None else 401), None

    def orders(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.rig.orders.read_text())
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Still]:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [subprocess.Popen(sleep) for _ in range(4)]
    try:
        yield Still(tmp_path, [process.pid for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _done(job: Still, kind: str, **target: Any) -> inject.Hit:
    options = {**KINDS[kind].options, **target.pop("options", {})}
    return KINDS[kind].inject(job, Target(options=options, **target))


def test_signals_reach_the_rank_alone(job: Still) -> None:
    hit = _done(job, "sigstop", rank=2)
    assert (hit.rank, hit.node) == (2, "n1")
    deadline_s = time.monotonic() + 5.0
    while _state(job.pids[2]) != "T":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert [_state(pid) for pid in job.pids].count("T") == 1
    _done(job, "kill", rank=2)
    while _state(job.pids[2]) != "Z":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _state(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat else "Z"


def test_orders_add_up_and_say_whom_and_when(job: Still) -> None:
    hits = [
        _done(job, "exit_code", rank=3, options={"code": 9}),
        _done(job, "exception_everywhere"),
        _done(job, "same_fault", rank=1),
    ]
    first, everywhere, again = job.orders()
    assert [hit.order for hit in hits] == [first["id"], everywhere["id"], again["id"]]
    assert (first["kind"], first["ranks"], first["code"]) == ("exit", [3], 9)
    assert "step" not in first
    assert everywhere["ranks"] == [0, 1, 2, 3]
    assert everywhere["step"] == 33 + 40, "ahead of the rank that is ahead"
    assert (again["kind"], again["ranks"], again["times"]) == ("segv", [1], 9)


def test_what_ranks_wrote_down_is_read_first_things_first(job: Still) -> None:
    order = job.order("segv", [0, 1])
    done = job.rig.folder / "done"
    done.mkdir()
    for rank, moment in ((0, 70), (1, 50)):
        entry = {"monotonic_ns": moment, "step": 4, "epoch": 1, "pid": 1}
        (done / f"{order}-{rank}-0.json").write_text(json.dumps(entry))
    assert [entry["rank"] for entry in job.happened(order)] == [1, 0]
    assert job.happened("17") == []


def test_devices_and_ports_of_the_nodes_host(job: Still) -> None:
    assert _done(job, "xid", node=1).node == "n1"
    assert json.loads(job.rig.host("node1").devices.read_text())["xids"] == [[0, 79]]
    assert json.loads(job.rig.host("node0").devices.read_text())["xids"] == []
    port = job.rig.host("node0").sys / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "state"
    seen = [port.read_text().strip()]

    def look() -> None:
        for _ in range(60):
            seen.append(port.read_text().strip())
            time.sleep(0.01)

    watching = threading.Thread(target=look)
    watching.start()
    _done(job, "nic_flaps", node=0, options={"seconds": 0.1})
    watching.join()
    states = [state for state, _ in groupby(seen)]
    assert states == ["4: ACTIVE", "1: DOWN", "4: ACTIVE", "1: DOWN"]


def test_a_clock_is_that_of_the_agent_and_its_ranks(job: Still) -> None:
    _done(job, "clock_skew", node=1)
    assert float(job.rig.host("node1").clock.read_text()) == 3600.0
    assert not job.rig.host("node0").clock.exists()
    assert [(order["kind"], order["ranks"]) for order in job.orders()] == [("clock", [2, 3])]


def test_the_newest_checkpoint_is_damaged_in_the_middle(job: Still) -> None:
    folder = job.spec.folder / "checkpoints"
    data = bytes(range(256)) * 40
    for step in (5, 10):
        (folder / f"step-{step:08d}").mkdir(parents=True)
        for shard in range(4):
            (folder / f"step-{step:08d}" / f"rank-{shard:05d}.safetensors").write_bytes(data)
    (folder / "step-00000005" / "COMMITTED").write_text("{}")
    later = threading.Timer(0.2, (folder / "step-00000010" / "COMMITTED").write_text, ("{}",))
    later.start()
    hit = _done(job, "corrupt_checkpoint", rank=0)
    assert hit.said == {"corrupt": 10}
    files = {path: path.read_bytes() != data for path in folder.glob("step-*/rank-*.safetensors")}
    damaged = [path for path, changed in files.items() if changed]
    assert [path.parent.name for path in damaged] == ["step-00000010"]
    assert sum(a != b for a, b in zip(damaged[0].read_bytes(), data, strict=True)) == 64
    assert _state(job.pids[0]) in "ZR"


def test_nonsense_is_asked_with_and_without_the_token(job: Still) -> None:
    hit = _done(job, "fuzz", options={"requests": 60})
    assert sum(hit.said["answers"].values()) == 60
    assert {*hit.said["answers"]} == {401, 422}
    with_token = [path for path, _, token in job.asked if token is None]
    assert "/v1/stop" not in with_token, "that one would be obeyed"
    assert len({body for _, body, _ in job.asked}) > 50
    job.asked.clear()
    again = inject_control.fuzz(job, Target(options={"requests": 60}))
    assert again.said == hit.said


def test_nobody_is_signalled_who_is_not_there(job: Still) -> None:
    with pytest.raises(Exception, match="rank 7 does not run now"):
        inject.rank_signal(signal.SIGKILL)(job, Target(rank=7))
