"""Interfaces and ports of a replayed sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cluster.agent.nics import MOST_COUNTERS, Nics

NET = {
    "operstate": "up\n",
    "speed": "400000\n",
    "mtu": "9000\n",
    "carrier_down_count": "3\n",
    "statistics/rx_bytes": "123456789\n",
    "statistics/tx_errors": "0\n",
    "qos/pfc": "0,0,0,1,0,0,0,0\n",
    "qos/trust": "dscp\n",
    "ecn/roce_np/enable/3": "1\n",
    "device/hwmon/hwmon4/power1_input": "912\n",
}
PORT = {
    "ports/1/state": "4: ACTIVE\n",
    "ports/1/phys_state": "5: LinkUp\n",
    "ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "ports/1/counters/link_downed": "2\n",
    "ports/1/counters/symbol_error": "17\n",
    "ports/1/counters/port_xmit_data": "99999999999\n",
    "ports/1/hw_counters/roce_adp_retrans": "5\n",
    "ports/1/hw_counters/np_cnp_sent": "811\n",
    "tc/1/traffic_class": "Global tclass=106\n",
    "fw_ver": "28.43.2026\n",
}


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    _write(tmp_path / "class/net/ens1f0np0", NET)
    _write(tmp_path / "class/net/lo", {"operstate": "unknown\n"})
    _write(tmp_path / "class/infiniband/mlx5_0", PORT)
    return tmp_path


def test_state_counters_and_settings(tree: Path) -> None:
    net, port = Nics(tree).read()
    assert (net.name, net.up, net.flaps) == ("ens1f0np0", True, 0)
    assert net.counters == {"rx_bytes": 123456789, "tx_errors": 0, "carrier_down_count": 3}
    assert net.settings == {
        "speed": "400000",
        "mtu": "9000",
        "qos/pfc": "0,0,0,1,0,0,0,0",
        "qos/trust": "dscp",
        "ecn/roce_np/enable/3": "1",
        "device/hwmon/hwmon4/power1_input": "912",
    }
    assert (port.name, port.up) == ("mlx5_0/1", True)
    assert port.counters == {
        "link_downed": 2,
        "symbol_error": 17,
        "port_xmit_data": 99999999999,
        "roce_adp_retrans": 5,
        "np_cnp_sent": 811,
    }
    assert port.settings == {
        "rate": "400 Gb/sec (4X NDR)",
        "phys_state": "5: LinkUp",
        "fw_ver": "28.43.2026",
        "tc/1/traffic_class": "Global tclass=106",
    }


def test_flaps_are_counted_and_outages_timed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("megascale.cluster.agent.nics.time.monotonic", lambda: now_s[0])
    reader = Nics(tree)
    state = tree / "class/net/ens1f0np0/operstate"
    told = []
    for at_s, word in (
        (100, "up"),
        (101, "down"),
        (103, "down"),
        (104, "up"),
        (110, "up"),
        (120, "down"),
    ):
        now_s[0] = at_s
        state.write_text(word)
        report = reader.read()[0]
        told.append((report.up, report.flaps, report.down_s))
    assert told == [
        (True, 0, 0.0),
        (False, 1, 0.0),
        (False, 1, 2.0),
        (True, 1, 3.0),
        (True, 1, 3.0),
        (False, 2, 0.0),
    ]


def test_a_port_that_is_not_active_is_down(tree: Path) -> None:
    (tree / "class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert not Nics(tree).read()[1].up


def test_a_tree_without_anything_and_one_with_too_much(tmp_path: Path, tree: Path) -> None:
    assert Nics(tmp_path / "none").read() == []
    many = {f"ecn/roce_np/enable/{n}": "1" for n in range(200)}
    _write(tree / "class/net/ens1f0np0", many)
    assert len(Nics(tree).read()[0].settings) == MOST_COUNTERS


def test_the_machine_itself_can_be_read() -> None:
    assert isinstance(Nics(Path("/sys")).read(), list)
