"""Traffic and ports: what stops, falls, fluctuates, is set otherwise or flaps; what does not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from megascale.telemetry.diagnose.nic_health import dark_optics, erring_ports
from megascale.telemetry.diagnose.nic_settings import differing_settings, flapping_links
from megascale.telemetry.diagnose.traffic import (
    BASELINE_STEPS,
    CONFIRM,
    Port,
    bytes_per_step,
    changed,
    stopped,
    usual_bytes,
)

NODES = 8
PORTS = [Port(f"n{node}", "mlx5_0/1", (2 * node, 2 * node + 1)) for node in range(NODES)]
RANKS_OF = {f"n{node}": (2 * node, 2 * node + 1) for node in range(NODES)}


def _steps(seed: int, num_steps: int = 60) -> NDArray[np.float64]:
    """Healthy ports: 1 GB a step, 2 % of retransmission noise, a step in four with a checkpoint's
    share for all."""
    rng = np.random.default_rng(seed)
    of_job_S = np.where(np.arange(num_steps) % 4 == 0, 1.2, 1.0)
    return np.asarray(1e9 * of_job_S[:, None] * rng.normal(1.0, 0.02, (num_steps, NODES)))


def _counters(seed: int, until_s: int = 60) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One sample a second; steps of 2 s, so every other second is silent."""
    rng = np.random.default_rng(seed)
    times_T = np.arange(until_s, dtype=float)
    moved_TP = rng.uniform(0.9, 1.1, (until_s, NODES)) * 1e9 * (times_T % 2 == 0)[:, None]
    return times_T, np.cumsum(moved_TP, axis=0)


@pytest.mark.parametrize("seed", range(20))
def test_clean_traffic_says_nothing(seed: int) -> None:
    bytes_SP = _steps(seed)
    for end in range(1, len(bytes_SP) + 1):
        assert changed(bytes_SP[:end], PORTS, end) == []
    times_T, counters_TP = _counters(seed)
    for end in range(1, len(times_T) + 1):
        assert stopped(times_T[:end], counters_TP[:end], PORTS) is None


def test_a_port_that_stops_is_certain_at_once() -> None:
    times_T, counters_TP = _counters(1)
    counters_TP[30:, 5] = counters_TP[29, 5]
    found = [stopped(times_T[:end], counters_TP[:end], PORTS) for end in range(1, 61)]
    first = next(end for end, finding in enumerate(found) if finding is not None)
    assert times_T[first] <= 30 + 8
    for finding in found[first:]:
        assert finding is not None
        assert (finding.ranks, finding.certain) == ((10, 11), True)
        assert list(finding.evidence["quiet_s"]) == ["n5/mlx5_0/1"]


def test_a_job_that_stops_accuses_no_port() -> None:
    """Ports fall silent one after the other, as the wait spreads."""
    times_T, counters_TP = _counters(2)
    for port in range(NODES):
        counters_TP[30 + port % 3 :, port] = counters_TP[29 + port % 3, port]
    found = [stopped(times_T[:end], counters_TP[:end], PORTS) for end in range(1, 61)]
    assert all(finding is None or finding.ranks == () for finding in found)
    assert found[-1] is not None
    assert found[-1].group == "world"


def test_an_unused_port_is_not_missed() -> None:
    times_T, counters_TP = _counters(3)
    counters_TP[:, 2] = 7.0
    assert stopped(times_T, counters_TP, PORTS) is None


def test_a_fall_is_an_alert_and_then_certain() -> None:
    bytes_SP = _steps(4)
    bytes_SP[40:, 3] *= 0.6
    for end, expected in ((41, False), (42, False), (43, True), (45, True), (50, True)):
        (finding,) = changed(bytes_SP[:end], PORTS, end)
        assert (finding.kind, finding.ranks) == ("traffic_fell", (6, 7))
        assert finding.certain is expected
        assert finding.evidence["relative"]["n3/mlx5_0/1"] == pytest.approx(0.6, abs=0.06)
    assert changed(bytes_SP[:40], PORTS, 40) == []


def test_a_batch_that_shrinks_is_no_fault() -> None:
    bytes_SP = _steps(5)
    bytes_SP[40:] *= 0.5
    assert all(changed(bytes_SP[:end], PORTS, end) == [] for end in range(41, 60))


def test_a_port_that_fluctuates() -> None:
    bytes_SP = _steps(6)
    bytes_SP[35::2, 1] *= 1.6  # and back: no fall
    kinds = {
        end: [(f.kind, f.ranks, f.certain) for f in changed(bytes_SP[:end], PORTS, end)]
        for end in range(BASELINE_STEPS + CONFIRM, 60)
    }
    assert all(kinds[end] == [] for end in kinds if end < 36)
    seen = [found for end, found in kinds.items() if found]
    assert seen[0] == [("traffic_fluctuates", (2, 3), False)]
    assert seen[CONFIRM + 1] == [("traffic_fluctuates", (2, 3), True)]


def test_a_step_without_a_report_is_not_zero() -> None:
    bytes_SP = _steps(7)
    bytes_SP[57:, 2] = np.nan
    bytes_SP[:, 6] = np.nan
    assert changed(bytes_SP, PORTS, 60) == []


def test_counters_become_bytes_per_step() -> None:
    steps, counter = [5, 5, 6, 8, 8, 9], [100, 120, 150, 350, 400, 20]
    assert bytes_per_step(steps, counter) == {6: 50.0, 7: 100.0, 8: 100.0}
    assert bytes_per_step([1, 2], [0, 10]) == {2: 10.0}


SETTINGS = {
    f"n{node}": {
        "eth0": {
            "speed": "200000",
            "ecn/roce_np/enable/3": "1",
            "qos/pfc": "0,0,0,1",
            "mtu": "4200",
            f"device/hwmon/hwmon{node}/power1_input": str(2000 + 10 * (node % 2)),
        },
        "mlx5_0/1": {"cc/adp_retrans": "1"},
    }
    for node in range(NODES)
}


def test_equal_settings_say_nothing() -> None:
    assert differing_settings(SETTINGS, RANKS_OF) is None
    assert differing_settings({}, RANKS_OF) is None


@pytest.mark.parametrize(
    ("port", "key", "value"),
    [
        ("eth0", "ecn/roce_np/enable/3", "0"),
        ("eth0", "qos/pfc", "0,0,0,0"),
        ("mlx5_0/1", "cc/adp_retrans", "0"),
        ("eth0", "mtu", None),
    ],
)
def test_the_node_that_is_set_otherwise(port: str, key: str, value: str | None) -> None:
    other = dict(SETTINGS["n6"][port])
    del other[key]
    if value is not None:
        other[key] = value
    settings = {**SETTINGS, "n6": {**SETTINGS["n6"], port: other}}
    finding = differing_settings(settings, RANKS_OF)
    assert finding is not None
    assert finding.ranks == (12, 13)
    usual = SETTINGS["n0"][port][key]
    assert finding.evidence["got_and_usual"] == {"n6": {f"{port} {key}": [value, usual]}}


def test_half_of_the_nodes_are_no_majority() -> None:
    settings = {
        node: {"eth0": {"mtu": "9000" if i < NODES / 2 else "1500"}}
        for i, node in enumerate(SETTINGS)
    }
    assert differing_settings(settings, RANKS_OF) is None


def test_flaps_count_within_their_time() -> None:
    quiet = {(f"n{node}", "eth0"): [(0.0, 0), (400.0, 0)] for node in range(NODES)}
    assert flapping_links(quiet, RANKS_OF, 400.0) == []
    once = {**quiet, ("n2", "eth0"): [(0.0, 0), (350.0, 1)]}
    (alert,) = flapping_links(once, RANKS_OF, 400.0)
    assert (alert.ranks, alert.certain) == ((4, 5), False)
    twice = {**once, ("n4", "eth0"): [(0.0, 3), (200.0, 4), (390.0, 5)]}
    certain, alert = flapping_links(twice, RANKS_OF, 400.0)
    assert (certain.ranks, certain.certain) == ((8, 9), True)
    assert certain.evidence["flaps"] == {"n4/eth0": 2}
    assert alert.ranks == (4, 5)
    assert flapping_links(twice, RANKS_OF, 1000.0) == []


def test_a_new_agent_counts_from_zero() -> None:
    history = {("n1", "eth0"): [(0.0, 9), (390.0, 1)]}
    (alert,) = flapping_links(history, RANKS_OF, 400.0)
    assert alert.evidence["flaps"] == {"n1/eth0": 1}


def test_a_fall_that_goes_on_does_not_become_the_usual() -> None:
    bytes_SP = _steps(8)
    bytes_SP[30:, 3] *= 0.6
    assert changed(bytes_SP, PORTS, 60) == [], "by its own newest past it has not changed"
    (finding,) = changed(bytes_SP, PORTS, 60, usual_bytes(bytes_SP[:31]))
    assert (finding.kind, finding.ranks, finding.certain) == ("traffic_fell", (6, 7), True)


def _growth(seed: int) -> dict[str, dict[str, dict[str, int]]]:
    """Errors and retransmissions of five minutes on healthy nodes; congestion is everywhere."""
    rng = np.random.default_rng(seed)
    return {
        node: {
            "mlx5_0/1": {
                "symbol_error": int(rng.poisson(0.5)),
                "roce_adp_retrans": int(rng.poisson(400)),
                "port_xmit_data": 1 << 40,
            }
        }
        for node in RANKS_OF
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_port_that_errs_more_than_the_others(seed: int) -> None:
    growth = _growth(seed)
    assert erring_ports(growth, RANKS_OF) is None
    growth["n2"]["mlx5_0/1"]["symbol_error"] = 60
    finding = erring_ports(growth, RANKS_OF)
    assert finding is not None
    assert (finding.kind, finding.ranks, finding.certain) == ("nic_errors", (4, 5), False)
    assert list(finding.evidence["got_and_usual"]) == ["n2"]
    growth["n2"]["mlx5_0/1"]["symbol_error"] = 0
    growth["n6"]["mlx5_0/1"]["roce_adp_retrans"] = 9000
    finding = erring_ports(growth, RANKS_OF)
    assert finding is not None
    assert finding.ranks == (12, 13)


def test_optics_with_less_light_than_the_others() -> None:
    assert dark_optics(SETTINGS, RANKS_OF) is None
    dark = {**SETTINGS["n5"]["eth0"], "device/hwmon/hwmon5/power1_input": "900"}
    settings = {**SETTINGS, "n5": {**SETTINGS["n5"], "eth0": dark}}
    assert differing_settings(settings, RANKS_OF) is None, "light is no setting"
    finding = dark_optics(settings, RANKS_OF)
    assert finding is not None
    assert (finding.ranks, finding.certain) == ((10, 11), False)
    assert finding.evidence["got_and_usual"] == {"n5": {"eth0 power1": [900.0, 2000.0]}}


def test_of_two_nodes_none_is_usual() -> None:
    two = {node: SETTINGS[node] for node in ("n0", "n1")}
    two["n1"] = {"eth0": {**two["n1"]["eth0"], "device/hwmon/hwmon1/power1_input": "9"}}
    assert dark_optics(two, RANKS_OF) is None
    growth = {"n0": {"eth0": {"rx_errors": 0}}, "n1": {"eth0": {"rx_errors": 99}}}
    assert erring_ports(growth, RANKS_OF) is None
