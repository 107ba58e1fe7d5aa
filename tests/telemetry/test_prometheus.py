"""A node's endpoint, scraped over HTTP and read by Prometheus' own parser."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megascale.env import free_port
from megascale.events import Dropped, Incident, Ongoing, Step, Sums, run_header
from megascale.telemetry import prometheus
from megascale.telemetry.metrics import Metrics, MetricsLogger
from megascale.telemetry.prometheus import MOST_NAMES, NodeMetrics, serve, start_endpoint
from megascale.telemetry.tail import Tail
from megascale.telemetry.writer import LineWriter, line_file
from megascale.topology import Mesh

Values = dict[tuple[str, tuple[str, ...]], float]


def _scrape(port: int) -> Values:
    """Value by (name, labels' values)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _write(folder: Path, rank: int, step: int) -> None:
    with LineWriter(line_file(folder, rank), rank=rank) as writer:
        header = run_header(Mesh(1, 2, 1), rank, host="h0")
        writer(header)
        sums = {"forward": {"total_ns": 300_000_000, "count": 2}}
        writer(Sums(rank=rank, step=step, sums=sums))
        now_ns = header.monotonic_ns - 2_000_000_000
        writer(Step(rank=rank, step=step, t0_ns=now_ns, dur_ns=500, clock="host", sampled=False))
        writer(Incident(rank=rank, name="checkpoint", t_ns=now_ns, detail={}))
        writer(Dropped(rank=rank, where="writer", count=3))


@pytest.mark.full
def test_a_scrape(tmp_path: Path) -> None:
    for rank in (0, 1):
        _write(tmp_path, rank, 7 + rank)
    with MetricsLogger(tmp_path, console=lambda _line: None) as logger:
        logger.log(Metrics(step=7, loss=2.5, tokens_per_s=1e6, mfu=0.55))
    port = free_port()
    server, thread = serve(NodeMetrics(tmp_path, range(2)), port)
    try:
        found = _scrape(port)
        assert found["megascale_step", ("0",)] == 7
        assert found["megascale_step", ("1",)] == 8
        assert found["megascale_step_seconds", ("1",)] == 5e-7
        assert found["megascale_phase_seconds", ("0", "forward")] == 0.3
        assert found["megascale_incidents_total", ("0", "checkpoint")] == 1
        assert found["megascale_dropped_events_total", ("1", "writer")] == 3
        assert 2 <= found["megascale_progress_age_seconds", ("0",)] < 60
        assert found["megascale_waiting_seconds", ("0",)] == 0
        assert found["megascale_loss", ()] == 2.5
        assert found["megascale_mfu_ratio", ()] == 0.55
        assert found["megascale_tokens_per_second", ()] == 1e6
        with LineWriter(line_file(tmp_path, 1), rank=1) as writer:
            now_ns = time.monotonic_ns()
            writer(Ongoing(rank=1, t_ns=now_ns, waited_ns=30_000_000_000, name="world_sums"))
        assert _scrape(port)["megascale_waiting_seconds", ("1",)] >= 30
        _write(tmp_path, 1, 9)
        found = _scrape(port)
        assert (found["megascale_step", ("1",)], found["megascale_waiting_seconds", ("1",)]) == (
            9,
            0,
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_series_are_bounded(tmp_path: Path) -> None:
    with LineWriter(line_file(tmp_path, 3), rank=3) as writer:
        for number in range(3 * MOST_NAMES):
            writer(Incident(rank=3, name=f"oddity {number}", t_ns=1))
        sums = {f"phase {n}": {"total_ns": 1, "count": 1} for n in range(3 * MOST_NAMES)}
        writer(Sums(rank=3, step=1, sums=sums))
    families = {family.name: family for family in NodeMetrics(tmp_path, [3, 4]).collect()}
    assert len(families["megascale_incidents"].samples) == MOST_NAMES + 1
    assert len(families["megascale_phase_seconds"].samples) == MOST_NAMES
    assert "megascale_loss" not in families, "of the node of rank 0 alone"


def test_a_port_in_use_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.WARNING):
        port = other.getsockname()[1]
        assert serve(NodeMetrics(tmp_path, [0]), port, bind_for_s=0.0) is None
    assert f"telemetry.prometheus_port {port} on 127.0.0.1 cannot be used" in caplog.text


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert serve(NodeMetrics(tmp_path, [0]), 1) is None
    assert "pip install 'megascale[telemetry]'" in caplog.text


@pytest.mark.full
def test_the_endpoint_is_a_process(tmp_path: Path) -> None:
    _write(tmp_path, 0, 5)
    port = free_port()
    child = start_endpoint(tmp_path, range(1), port)
    try:
        give_up_s = time.monotonic() + 20
        while True:
            try:
                found = _scrape(port)
                break
            except OSError:
                assert child.poll() is None
                assert time.monotonic() < give_up_s
                time.sleep(0.05)
        assert found["megascale_step", ("0",)] == 5
    finally:
        child.kill()
        child.wait()


def test_it_ends_with_who_began_it(tmp_path: Path) -> None:
    port, stranger = free_port(), os.getpid() + 1
    began_s = time.monotonic()
    prometheus.main([str(tmp_path), "0", "1", str(port), str(stranger)])
    assert time.monotonic() - began_s < 5


@pytest.mark.full
def test_the_tail_of_a_file_that_grows_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"a\nb\nhal")
    assert list(tail.lines()) == [b"a", b"b"]
    with path.open("ab") as file:
        file.write(b"f\nc\n")
    assert list(tail.lines()) == [b"half", b"c"]
    path.write_bytes(b"d\n")
    assert list(tail.lines()) == [b"d"]
    big = b"".join(b"%d\n" % number for number in range(300_000))
    other = tmp_path / "other"
    other.write_bytes(big)
    last = list(Tail(other).lines())
    assert last[-1] == b"299999"
    assert 100_000 < len(last) < 300_000
    assert last == big.splitlines()[-len(last) :]
