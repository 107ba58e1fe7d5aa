"""A cluster file from samples (`megascale calibrate`): what was measured, what was fitted on it,
and for the rest the figures of the catalogue's file of the same device, each with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascale.plan.machine.device import Device
from megascale.plan.machine.fitting import (
    fit_attention,
    fit_gemm,
    fit_links,
    fit_memory,
    fit_overlap,
)
from megascale.plan.machine.links import NodeLink
from megascale.plan.machine.load import cluster_from
from megascale.plan.machine.samples import Samples
from megascale.plan.machine.template import completed, template_of
from megascale.plan.machine.toml import toml_text

ON_SAMPLES = "fitted: on the samples below"


def write_cluster(
    path: Path,
    samples: Samples,
    num_devices: int,
    devices_per_node: int,
    *,
    num_sms: int | None = None,
    memory_gb: float | None = None,
) -> None:
    """Write the cluster file of what `samples` were measured on.

    num_sms, memory_gb  of the device, as its driver says; default: the catalogue's
    Raises ConfigError where the numbers make no cluster.
    """
    tables = cluster_tables(
        samples, num_devices, devices_per_node, num_sms=num_sms, memory_gb=memory_gb
    )
    tables = {"name": path.stem, **tables}
    cluster_from(tables, str(path))
    path.write_text(toml_text(tables), encoding="utf-8")


def cluster_tables(
    samples: Samples,
    num_devices: int,
    devices_per_node: int,
    *,
    num_sms: int | None = None,
    memory_gb: float | None = None,
) -> dict[str, Any]:
    """The file but its name: the template's tables, with what the samples tell in their place."""
    tables = _sized(template_of(samples), num_devices, devices_per_node)
    before = tables.pop("samples", None)
    both = completed(samples, None if before is None else Samples.model_validate(before))
    device = tables["device"]
    told = {"num_sms": num_sms, "memory_gb": memory_gb}
    _put(device, {k: v for k, v in told.items() if v is not None}, "measured: read from the device")
    if samples.launch_s > 0:
        _put(device, {"launch_s": samples.launch_s}, "measured")
    if samples.sustained is not None:
        _put(device["gemm"], {"sustained": samples.sustained}, "measured: for seconds on end")
    elif samples.gemm:  # what the template says is relative to other samples
        _put(device["gemm"], {"sustained": 1.0}, "assumed: the rate of the samples")
    _fit_device(device, both)
    node = NodeLink.model_validate(tables["nvlink"])
    _put(tables["nvlink"], fit_links(node, both.collective), ON_SAMPLES)
    _put(tables["overlap"], fit_overlap(samples.overlap), "measured: side by side, the median")
    tables["samples"] = both.model_dump(mode="json", exclude_defaults=True)
    return tables


def _sized(tables: dict[str, Any], num_devices: int, devices_per_node: int) -> dict[str, Any]:
    """Tables of that many devices; of one node, whose network was not asked about, without it."""
    unsaid = {"name", "notes"}
    if num_devices <= devices_per_node:
        unsaid |= {"network", "fabric", "most_devices"}
    tables = {key: value for key, value in tables.items() if key not in unsaid}
    if "most_devices" in tables:
        tables["most_devices"] = max(num_devices, tables["most_devices"])
    sizes = {"num_devices": num_devices, "devices_per_node": devices_per_node}
    return {**tables, **sizes, "source": "measured: the machine that was calibrated"}


def _fit_device(table: dict[str, Any], samples: Samples) -> None:
    """Memory first: its speed is part of the price of a product."""
    _put(table["memory"], fit_memory(Device.model_validate(table), samples.memory), "measured")
    _put(table["gemm"], fit_gemm(Device.model_validate(table), samples.gemm), ON_SAMPLES)
    device = Device.model_validate(table)
    _put(table["attention"], fit_attention(device, samples.attention), ON_SAMPLES)


def _put(table: dict[str, Any], numbers: Mapping[str, float], source: str) -> None:
    """Numbers into a section, and where each comes from."""
    if not numbers:
        return
    if isinstance(table["source"], str):
        table["source"] = {"*": table["source"]}
    for key, value in numbers.items():
        table[key] = int(value) if key == "num_sms" else float(f"{value:.5g}")
        table["source"][key] = source
