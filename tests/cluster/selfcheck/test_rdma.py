"""RDMA tests from recorded output of perftest: no NIC was at hand, so only its text and the
commands are tested, and the order of events with a program that prints such a text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megascale.cluster.selfcheck.rdma import (
    BandwidthTest,
    Port,
    measure,
    parse_bandwidth,
    plan_tests,
    read_ports,
)
from tests.cluster.selfcheck.alive import children

LINE = "-" * 87
HEAD = f"""{LINE}
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Number of qps   : 1\t\tTransport type : IB
 Connection type : RC\t\tUsing SRQ      : OFF
 Mtu             : 4096[B]
 Link type       : IB
 rdma_cm QPs\t : OFF
 Data ex. method : Ethernet
{LINE}
 local address: LID 0x02 QPN 0x0032 PSN 0x5f2841 RKey 0x002440 VAddr 0x007f2e5f64b000
 remote address: LID 0x01 QPN 0x003a PSN 0xc0fd7e RKey 0x002442 VAddr 0x007f443b2f8000
{LINE}
"""
COLUMNS = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
GBIT = f"""{HEAD}{COLUMNS}
 65536      20000            392.81             391.60 \t\t   0.746918
{LINE}
"""
ALL_SIZES = f"""{HEAD}{COLUMNS}
 2          5000           0.042350            0.042185            2.636533
 8          5000             0.17               0.17   \t\t   2.641399
 8388608    5000             98.60              98.52  \t\t   0.001468
{LINE}
"""
MEGABYTES = f"""{HEAD}{COLUMNS.replace("Gb/sec", "MB/sec")}
 65536      664644           0.00               11728.47\t\t   0.187656
{LINE}
"""
FAILED = f"""{HEAD}{COLUMNS}
 Completion with error at client
 Failed status 12: wr_id 0 syndrom 0x81
"""


@pytest.mark.parametrize(
    ("text", "gbit_s"),
    [
        (GBIT, 391.60),
        (ALL_SIZES, 98.52),
        (MEGABYTES, 11728.47 * 8 * 2**20 / 1e9),
        (FAILED, None),
        ("Couldn't connect to 127.0.0.1:18515", None),
        ("", None),
    ],
)
def test_recorded_output(text: str, gbit_s: float | None) -> None:
    got = parse_bandwidth(text)
    assert got == (None if gbit_s is None else pytest.approx(gbit_s))


def make_port(root: Path, device: str, state: str, rate: str, node: str | None) -> None:
    folder = root / "sys/class/infiniband" / device
    (folder / "ports/1").mkdir(parents=True)
    (folder / "ports/1/state").write_text(state + "\n")
    (folder / "ports/1/rate").write_text(rate + "\n")
    if node is not None:
        (folder / "device").mkdir()
        (folder / "device/numa_node").write_text(node + "\n")


def test_ports_that_are_up(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "1")
    make_port(tmp_path, "mlx5_0", "4: ACTIVE", "200 Gb/sec (4X HDR)", "-1")
    make_port(tmp_path, "mlx5_2", "1: DOWN", "10 Gb/sec (4X SDR)", "0")
    make_port(tmp_path, "mlx5_3", "4: ACTIVE", "", None)
    assert read_ports(tmp_path) == [Port("mlx5_0", 1, 200.0, None), Port("mlx5_1", 1, 400.0, 1)]
    assert read_ports(tmp_path / "none") == []


A, B = Port("mlx5_0", 1, 400.0, 0), Port("mlx5_1", 1, 400.0, 1)


def test_the_mesh_is_whole() -> None:
    places = [test.at for test in plan_tests([A, B], [0, 1], gpus=2)]
    assert places == [
        *("mlx5_0 to node 0", "mlx5_0 to node 1", "mlx5_1 to node 0", "mlx5_1 to node 1"),
        *("mlx5_0 to GPU 0", "mlx5_0 to GPU 1", "mlx5_1 to GPU 0", "mlx5_1 to GPU 1"),
        *("mlx5_1 to mlx5_0", "mlx5_0 to mlx5_1"),
    ]


def test_the_servers_memory_lies_where_it_is_asked() -> None:
    server, client = BandwidthTest(A, A, memory_node=1).commands(21000, "/usr/bin/numactl")
    assert server[:5] == ["/usr/bin/numactl", "--cpunodebind=1", "--membind=1", "ib_write_bw", "-d"]
    assert "--membind=1" not in client
    assert client[-1] == "127.0.0.1"
    server, client = BandwidthTest(A, B, gpu=3).commands(21000, None)
    assert "--use_cuda=3" in server
    assert "--use_cuda=3" not in client
    assert (server[2], client[2]) == ("mlx5_0", "mlx5_1")


def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    """An ib_write_bw: its server waits, its client (the one with an address) does `client`."""
    (tmp_path / "output").write_text(GBIT)
    program = tmp_path / "ib_write_bw"
    program.write_text(
        f'#!/bin/sh\nfor last; do :; done\nif [ "$last" = 127.0.0.1 ]; then {client}\n'
        "else sleep 600; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_rates_come_with_what_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_program(tmp_path, monkeypatch, f"cat {tmp_path}/output")
    tests = [
        BandwidthTest(A, A, memory_node=0),
        BandwidthTest(A, A, memory_node=1),
        BandwidthTest(A, A, gpu=0),
        BandwidthTest(A, B),
    ]
    outcome = measure(tests, time.monotonic() + 60.0)
    assert outcome.result is not None, outcome.reason
    rates = outcome.result["rates"]
    assert [rate["value"] for rate in rates] == [391.60] * 4
    assert [rate.get("expected") for rate in rates] == [400.0, None, None, None]
    assert [rate["class"] for rate in rates] == [
        *("rdma_node_gbit_s", "rdma_node_far_gbit_s", "rdma_gpu_gbit_s", "rdma_nic_gbit_s")
    ]
    assert children() == []


def test_a_client_that_comes_too_early_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = f"[ -e {tmp_path}/came ] || {{ touch {tmp_path}/came; exit 1; }}"
    fake_program(tmp_path, monkeypatch, f"{early}; cat {tmp_path}/output")
    assert measure([BandwidthTest(A, A)], time.monotonic() + 60.0).result is not None


def test_a_test_that_fails_or_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [BandwidthTest(A, A, memory_node=0)]
    fake_program(tmp_path, monkeypatch, "echo no device >&2; exit 1")
    outcome = measure(tests, time.monotonic() + 3.0)
    assert "mlx5_0 to node 0: ib_write_bw exited 1: no device" in outcome.reason
    fake_program(tmp_path, monkeypatch, "sleep 600")
    start = time.monotonic()
    outcome = measure(tests, start + 3.0)
    assert time.monotonic() - start < 3.0 + 2.0
    assert "mlx5_0 to node 0: ib_write_bw took too long" in outcome.reason
    assert measure(tests, time.monotonic()).kind == "late"
    assert children() == []
