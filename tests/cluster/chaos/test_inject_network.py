"""Ports of a job that stands still: a link that blinks, traffic that stops at one node."""

from __future__ import annotations

import time
from pathlib import Path

from megascale.cluster.agent.nics import Nics
from megascale.cluster.chaos.faults import KINDS
from megascale.cluster.chaos.inject import Target
from tests.cluster.chaos.test_inject import Still


def _bytes(job: Still, host: str) -> int:
    (port,) = (nic for nic in Nics(job.rig.host(host).sys).read() if nic.name == "mlx5_0/1")
    return port.counters["port_xmit_data"]


def _moves(job: Still, host: str) -> bool:
    before, until_s = _bytes(job, host), time.monotonic() + 5.0
    while _bytes(job, host) == before and time.monotonic() < until_s:
        time.sleep(0.05)
    return _bytes(job, host) > before


def test_traffic_stops_at_one_node_and_goes_on_at_the_others(tmp_path: Path) -> None:
    job = Still(tmp_path, [])
    kind = KINDS["traffic_stops"]
    hit = kind.inject(job, Target(node=1, options={**kind.options, "seconds": 1.0}))
    assert hit.node == "n1"
    time.sleep(0.5)  # what is being written
    still = _bytes(job, "node1")
    assert still > 1_000_000, "it moved before"
    assert _moves(job, "node0")
    assert _bytes(job, "node1") == still
    job.undo_all()
    assert not _moves(job, "node0"), "the feed ends with the job"


def test_a_link_blinks_once(tmp_path: Path) -> None:
    job = Still(tmp_path, [])
    nics = Nics(job.rig.host("node0").sys)
    nics.read()
    kind = KINDS["link_blip"]
    began_s = time.monotonic()
    hit = kind.inject(job, Target(node=0, options={"seconds": 0.3}))
    assert hit.node == "n0"
    assert time.monotonic() - began_s >= 0.3
    (port,) = (nic for nic in nics.read() if nic.name == "mlx5_0/1")
    assert port.up
