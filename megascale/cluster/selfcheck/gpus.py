"""Are all GPUs there and healthy: NVML's facts against rules. Pure; `nvml.py` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megascale.cluster.selfcheck.check import Check
from megascale.cluster.selfcheck.process import Outcome

SERIOUS_THROTTLE = {"hw_slowdown", "hw_thermal", "hw_power_brake"}


def judge_gpus(outcome: Outcome, num_known: int | None) -> Check:
    """num_known  GPUs that this node has shown before; fewer means that one is lost.

    A node without GPUs, driver files and memory of either: does not apply.
    """
    if outcome.result is None:
        return Check("gpus", False, outcome.seconds, outcome.reason)
    found = outcome.result
    devices, files = found["devices"], found["device_files"]
    missing = found.get("missing", "")
    wanted = max(files, num_known or 0)
    if not devices and wanted == 0:
        reason = "no GPU: no /dev/nvidia*" + (f"; {missing}" if missing else "")
        return Check("gpus", None, outcome.seconds, reason)
    failures = []
    if len(devices) < wanted:
        failures.append(
            f"{len(devices)} of {wanted} GPUs answer"
            + (f" ({missing})" if missing else "; the driver or the run folder knows the others")
        )
    most_links = max((device.get("nvlinks", 0) for device in devices), default=0)
    failures += [text for device in devices if (text := _ill(device, most_links))]
    return Check(
        "gpus",
        not failures,
        outcome.seconds,
        "; ".join(failures),
        float(len(devices)),
        "GPUs",
        float(wanted),
        {"driver": found.get("driver"), "devices": devices},
    )


def num_gpus(outcome: Outcome) -> int:
    """As NVML counts; 0 where it did not answer."""
    return 0 if outcome.result is None else len(outcome.result["devices"])


def _ill(device: Mapping[str, Any], most_links: int) -> str:
    """What is wrong with a GPU; empty where nothing is."""
    if "lost" in device:
        return f"GPU {device['index']} is lost ({device['lost']}): reset or replace it"
    wrong = []
    if device.get("ecc_uncorrected", 0) > 0:
        wrong.append(f"{device['ecc_uncorrected']} uncorrected memory errors since its reset")
    _, _, pending, failed = device.get("remapped", [0, 0, 0, 0])
    if failed:
        wrong.append("a memory row could not be remapped")
    elif pending:
        wrong.append("a memory row waits for a reset to be remapped")
    if serious := SERIOUS_THROTTLE.intersection(device.get("throttle", [])):
        wrong.append(f"slowed down by {', '.join(sorted(serious))}")
    if device.get("temperature_c", 0) >= device.get("slowdown_c", 1000):
        wrong.append(f"{device['temperature_c']} C, slows down at {device['slowdown_c']}")
    if device.get("pcie_width", 16) < device.get("pcie_width_most", 0):
        wrong.append(f"PCIe x{device['pcie_width']} of x{device['pcie_width_most']}")
    if device.get("nvlinks", 0) < most_links:
        wrong.append(f"{device['nvlinks']} NVLinks up, others of this node have {most_links}")
    if not wrong:
        return ""
    return f"GPU {device['index']} ({device['name']}, {device.get('uuid', '')}): {', '.join(wrong)}"
