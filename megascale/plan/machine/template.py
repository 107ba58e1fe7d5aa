"""What a cluster file says of a device before anything is measured: the catalogue's file of that
device, else its peak and figures of no device in particular, stated as such."""

from __future__ import annotations

import copy
from typing import Any

from megascale.plan.machine.load import CATALOGUE, cluster_tables_of
from megascale.plan.machine.samples import Samples
from megascale.units import peak_tflops


def template_of(samples: Samples) -> dict[str, Any]:
    """Tables of a cluster file for the device of `samples`."""
    known = peak_tflops(samples.device)
    for name in CATALOGUE:
        tables = copy.deepcopy(cluster_tables_of(name))
        device = tables["device"]
        if device["name"] == samples.device or (
            known is not None and peak_tflops(device["name"]) == known
        ):
            device["name"] = samples.device
            return tables
    return _of_no_device(samples)


def _of_no_device(samples: Samples) -> dict[str, Any]:
    """Peaks by the table of devices, else by the best samples; curves of a device like others."""
    tables = copy.deepcopy(cluster_tables_of("a100"))
    device = tables["device"]
    known = peak_tflops(samples.device)
    rates = [2e-12 * s.rows * s.columns * s.depth / s.seconds for s in samples.gemm]
    if known is not None:
        peak, source = known[0], "data sheet"
    else:
        peak, source = (
            max(rates, default=1.0) / 0.9,
            "assumed: 1.11 times the best product measured",
        )
    speed = max((s.num_bytes / s.seconds for s in samples.memory), default=1e11) / 0.9e9
    device.update(name=samples.device, peak_tflops=peak, memory_gb_s=speed)
    device["source"] = {
        "*": "assumed: nothing is known of this device",
        "peak_tflops": source,
        "memory_gb_s": "assumed: 1.11 times the best pass measured",
    }
    for section in (device["gemm"], device["attention"], device["memory"], tables["nvlink"]):
        section["source"] = "assumed: as an A100, nothing is known of this device"
    tables["overlap"]["source"] = "assumed: as an A100, nothing is known of this device"
    return tables
