"""Counters by the millisecond: of a replayed tree, of this machine's own loopback under traffic, of
a stand-in for NVML; and what the reader makes of planted congestion."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megascale.errors import ConfigError, DataError
from megascale.events import Counters, Header, read_events, run_header
from megascale.telemetry.diagnose.port_use import PortSamples, port_uses
from megascale.telemetry.monitor.__main__ import main as child
from megascale.telemetry.monitor.asked import MonitorRequests
from megascale.telemetry.monitor.command import Monitoring, monitor_run, node_file
from megascale.telemetry.monitor.nvlink import nvlink_ports
from megascale.telemetry.monitor.ports import sysfs_ports
from megascale.telemetry.monitor.sampling import sample
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.requests import Request, read_answer, write_request
from megascale.telemetry.store.run import open_run
from megascale.telemetry.writer import LineWriter, line_file
from megascale.topology import Mesh

# ---------------------------------------------------------------- a tree like sysfs


class Tree:
    """Ports whose counters a test moves on, in place as the kernel does."""

    def __init__(self, root: Path, num_ports: int = 4) -> None:
        self.root, self.devices = root, [f"mlx5_{number}" for number in range(num_ports)]
        for device in self.devices:
            port = root / "class" / "infiniband" / device / "ports" / "1"
            (port / "counters").mkdir(parents=True)
            (port / "hw_counters").mkdir()
            (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
            for name in ("port_xmit_data", "port_rcv_data", "port_xmit_discards"):
                (port / "counters" / name).write_text("0\n")
            (port / "hw_counters" / "np_ecn_marked_roce_packets").write_text("0\n")
        net = root / "class" / "net" / "eth0"
        (net / "statistics").mkdir(parents=True)
        (net / "speed").write_text("25000\n")
        for name in ("rx_bytes", "tx_bytes", "rx_dropped"):
            (net / "statistics" / name).write_text("7\n")

    def move(self, device: str, num_bytes: int, marks: int = 0) -> None:
        port = self.root / "class" / "infiniband" / device / "ports" / "1"
        for name in ("port_xmit_data", "port_rcv_data"):
            _add(port / "counters" / name, num_bytes // 4)
        _add(port / "hw_counters" / "np_ecn_marked_roce_packets", marks)

    @contextmanager
    def traffic(self, slow: str, factor: float) -> Iterator[None]:
        """Bursts of 20 ms every 50 ms, 45 GB/s of a 50 GB/s link; one port slower, with marks."""
        ended = threading.Event()

        def move() -> None:
            before_s = began_s = time.monotonic()
            while not ended.wait(0.001):
                now_s = time.monotonic()
                if (now_s - began_s) % 0.05 < 0.02:
                    for device in self.devices:
                        rate = 45e9 / (factor if device == slow else 1.0)
                        self.move(device, int(rate * (now_s - before_s)), marks=device == slow)
                before_s = now_s

        thread = threading.Thread(target=move)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _add(file: Path, number: int) -> None:
    with file.open("r+") as open_file:
        value = int(open_file.read()) + number
        open_file.seek(0)
        open_file.write(f"{value}\n")


def test_ports_of_a_tree(tmp_path: Path) -> None:
    tree = Tree(tmp_path, num_ports=1)
    tree.move("mlx5_0", 4000, marks=3)
    eth0, rdma = sysfs_ports(tmp_path)
    assert (eth0.name, eth0.speed_bytes_per_s, eth0.bytes_moved()) == ("eth0", 3.125e9, (7, 7))
    assert (rdma.name, rdma.speed_bytes_per_s, rdma.bytes_moved()) == (
        "mlx5_0/1",
        50e9,
        (4000,) * 2,
    )
    assert (eth0.marks(), rdma.marks()) == (7, 3)
    tree.move("mlx5_0", 400)
    assert rdma.bytes_moved() == (4400, 4400), "the files stay open"
    assert [port.name for port in sysfs_ports(tmp_path, ["mlx5*"])] == ["mlx5_0/1"]
    assert sysfs_ports(tmp_path / "nothing") == []
    for port in (eth0, rdma):
        port.close()


# ---------------------------------------------------------------- this machine's own loopback


def _send(num_bytes: int, chunk: bytes = b"x" * 65536) -> None:
    """Over TCP on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

    def receive() -> None:
        while receiver.recv(1 << 20):
            pass

    thread = threading.Thread(target=receive)
    thread.start()
    for _ in range(num_bytes // len(chunk)):
        sender.sendall(chunk)
    sender.close()
    thread.join()
    receiver.close()


@pytest.mark.full
def test_the_loopback_under_traffic(tmp_path: Path) -> None:
    thread = threading.Timer(0.1, _send, (64 << 20,))
    ports = sysfs_ports(Path("/sys"), ["lo"])
    assert [port.name for port in ports] == ["lo"]
    thread.start()
    (series,), achieved = sample(ports, interval_s=0.002, seconds=0.6)
    thread.join()
    ports[0].close()
    assert series.sent[-1] - series.sent[0] >= 64 << 20
    assert achieved.num_samples + achieved.missed == pytest.approx(300, abs=2)
    assert achieved.median_ms < 20
    samples = _samples("lo", np.array(series.t_ns) / 1e9, np.array(series.sent), None)
    (use,) = port_uses([samples])
    assert use.busy_s < use.seconds
    assert use.num_bytes >= 0.99 * (64 << 20)
    assert use.reached is None, "a loopback has no speed"


def _samples(
    port: str, t_s: Any, moved: Any, speed: float | None, marks: Any = None, host: str = "h0"
) -> PortSamples:
    values = np.asarray(moved, np.float64)
    nothing = np.full(len(values), np.nan) if marks is None else np.asarray(marks, np.float64)
    return PortSamples(host, port, np.asarray(t_s, np.float64), values, values / 2, nothing, speed)


# ---------------------------------------------------------------- what samples mean


def _bursts(rate: float, marks_a_ms: float = 0.0, busy_ms: int = 40) -> tuple[Any, Any, Any]:
    """(t, bytes, marks) each 2 ms over 1 s: bursts every 100 ms."""
    t_ms = np.arange(0, 1000, 2)
    busy = t_ms % 100 < busy_ms
    moved = np.concatenate([[0], np.cumsum(busy[:-1] * rate * 0.002)])
    marks = np.concatenate([[0], np.cumsum(busy[:-1] * marks_a_ms * 2)]).astype(float)
    marks[np.arange(len(marks)) % 10 > 0] = np.nan
    return t_ms / 1e3, moved, marks


def test_bursts_and_how_fast_they_were() -> None:
    t_s, moved, marks = _bursts(45e9)
    (use,) = port_uses([_samples("mlx5_0/1", t_s, moved, 50e9, marks)])
    assert len(use.bursts) == 10
    assert use.busy_s == pytest.approx(0.4, rel=0.05)
    assert use.rate == pytest.approx(45e9, rel=0.02)
    assert use.reached == pytest.approx(0.9, rel=0.02)
    assert use.full_share is not None
    assert use.full_share > 0.5
    assert (use.marks, use.congested_share, use.is_congested) == (0.0, 0.0, False)
    assert use.renewed_ms == pytest.approx(2.0)


def test_congestion_and_who_is_behind() -> None:
    ports = []
    for number in range(8):
        slow = number == 5
        t_s, moved, marks = _bursts(15e9 if slow else 45e9, 3.0 * slow, 90 if slow else 40)
        ports.append(_samples(f"mlx5_{number}/1", t_s, moved, 50e9, marks))
    uses = port_uses(ports)
    assert [use.port for use in uses if use.is_congested] == ["mlx5_5/1"]
    assert [use.port for use in uses if use.is_behind] == ["mlx5_5/1"]
    assert uses[5].of_peers == pytest.approx(1 / 3, rel=0.02)
    assert uses[5].full_share == 0.0


def test_a_counter_that_was_reset_moves_nothing_backwards() -> None:
    t_s, moved, _ = _bursts(45e9)
    moved = np.where(t_s > 0.5, moved - moved[250], moved)
    (use,) = port_uses([_samples("eth0", t_s, moved, 50e9)])
    assert 0.3 < use.busy_s < 0.45
    assert use.peak < 60e9


# ---------------------------------------------------------------- from the tree to the answer


def _run_folder(folder: Path, host: str) -> None:
    with LineWriter(line_file(folder, 0)) as writer:
        writer(run_header(Mesh(), 0, host=host))


def _ask(folder: Path) -> Answer:
    with open_run(folder) as run:
        answer = READERS["network"].ask(run, Window())
    json.dumps(answer.as_json(), allow_nan=False)
    return answer


@pytest.mark.full
def test_planted_congestion_is_named(tmp_path: Path) -> None:
    tree, run_dir = Tree(tmp_path / "sys"), tmp_path / "run"
    _run_folder(run_dir, "h0")
    arguments = ["--file", str(node_file(run_dir, "h0")), "--root", str(tree.root), "--host", "h0"]
    with tree.traffic(slow="mlx5_2", factor=3.0):
        child([*arguments, "--seconds", "0.6", "--interval-ms", "2", "--no-nvlink"])
    events = list(read_events(node_file(run_dir, "h0")))
    assert isinstance(events[0], Header)
    assert {event.port for event in events if isinstance(event, Counters)} == {
        "eth0",
        *(f"mlx5_{number}/1" for number in range(4)),
    }
    answer = _ask(run_dir)
    assert answer.level == "alert"
    assert answer.data["congested"] == ["h0 mlx5_2/1"]
    assert "h0 mlx5_2/1 was congested in" in answer.summary
    by_port = {port["port"]: port for port in answer.data["ports"]}
    assert by_port["mlx5_2/1"]["marks"] > 0
    assert by_port["mlx5_0/1"]["marks"] == 0
    assert by_port["mlx5_2/1"]["of_peers"] < 0.7
    assert by_port["eth0"]["busy_s"] == 0.0


def test_nothing_was_sampled(tmp_path: Path) -> None:
    _run_folder(tmp_path, "h0")
    assert "no port was sampled; megascale monitor" in _ask(tmp_path).summary


@pytest.mark.full
def test_the_verb_samples_in_a_child(tmp_path: Path) -> None:
    tree, said = Tree(tmp_path / "sys", num_ports=1), list[str]()
    run_dir = tmp_path / "run"
    _run_folder(run_dir, "h0")
    what = Monitoring(interval_ms=5, seconds=0.1, root=tree.root)
    monitor_run(run_dir, what, everywhere=False, say=said.append)
    assert "samples of 2 ports in" in said[0]
    assert "(asked 5)" in said[1]
    nothing = Monitoring(interval_ms=5, seconds=0.1, root=tmp_path / "empty")
    with pytest.raises(DataError, match=r"no port with byte counters under .* fits"):
        monitor_run(run_dir, nothing, everywhere=False, say=said.append)


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--interval-ms is 0\.1; legal: 1 to 1000"):
        Monitoring(interval_ms=0.1)
    with pytest.raises(ConfigError, match="--seconds is 0"):
        Monitoring(seconds=0)
    with pytest.raises(DataError, match="there is no folder"):
        monitor_run(tmp_path / "none", Monitoring(), everywhere=False, say=print)


def test_requests_of_a_live_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.telemetry.monitor.asked.LOOK_INTERVAL_S", 0.02)
    asked: list[Monitoring] = []
    write_request(tmp_path, Request("old", "monitor", 1, 1))
    with MonitorRequests(tmp_path, range(8, 16), run=lambda _dir, what: asked.append(what)):
        write_request(tmp_path, Request("a-profile", "torch", 1, 1))
        write_request(tmp_path, Request("of-others", "monitor", 1, 1, (3,)))
        monitor_run(tmp_path, Monitoring(), everywhere=True, say=lambda _line: None)
        give_up_s = time.monotonic() + 10
        while not asked and time.monotonic() < give_up_s:
            time.sleep(0.01)
        (name,) = [path.stem for path in tmp_path.glob("telemetry/requests/monitor-*.json")]
        while (answer := read_answer(tmp_path, name, 8)) is None:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
    assert asked == [Monitoring()]
    assert answer.state == "done"


# ---------------------------------------------------------------- NVML


class FakeNvml:
    """Two GPUs with three links each; counters in KiB, speed in MB/s."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, unsupported: Sequence[int] = ()) -> None:
        self._unsupported = unsupported

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetNvLinkState(self, _handle: int, link: int) -> int:
        if link >= 3:
            raise self.NVMLError("no such link")
        return 1

    def nvmlDeviceGetFieldValues(self, handle: int, fields: Sequence[Any]) -> list[Any]:
        value = SimpleNamespace(ullVal=1000 * (handle + 1), uiVal=25_000)
        return [
            SimpleNamespace(nvmlReturn=3 if handle in self._unsupported else 0, value=value)
            for _ in fields
        ]


def test_nvlink() -> None:
    ports = nvlink_ports(FakeNvml())
    assert [port.name for port in ports] == ["nvlink0", "nvlink1"]
    assert ports[1].bytes_moved() == (2_048_000, 2_048_000)
    assert ports[0].speed_bytes_per_s == 75e9
    assert nvlink_ports(FakeNvml(unsupported=[0])) == []


def test_a_port_that_goes_away_ends_its_series(tmp_path: Path) -> None:
    reads = iter([(1, 1), (2, 2)])

    def moved() -> tuple[int, int]:
        try:
            return next(reads)
        except StopIteration:
            raise OSError("gone") from None

    gone: Any = SimpleNamespace(
        name="a", speed_bytes_per_s=None, bytes_moved=moved, marks=lambda: None
    )
    (series,), achieved = sample([gone], interval_s=0.002, seconds=0.02)
    assert list(series.sent) == [1, 2]
    assert achieved.num_samples > 2
    nothing: Callable[[], bool] = lambda: True  # noqa: E731
    assert sample([gone], interval_s=0.002, seconds=5.0, stopped=nothing)[1].num_samples == 0
