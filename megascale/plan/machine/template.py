"""What a cluster file says of a device before anything is measured: the catalogue's file of that
device, else its peak and figures of no device in particular, stated as such.

Samples that the catalogue has of the same device, of what was not measured now (another number of
ranks, another pass), stay in the file and its `source` says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from megascale.plan.machine.load import CATALOGUE, cluster_tables_of
from megascale.plan.machine.samples import Samples
from megascale.units import peak_tflops

Row = TypeVar("Row")


def template_of(samples: Samples) -> dict[str, Any]:
    """Tables of a cluster file for the device of `samples`."""
    known = peak_tflops(samples.device)
    for name in CATALOGUE:
        tables = copy.deepcopy(cluster_tables_of(name))
        device = tables["device"]
        if device["name"] == samples.device or (
            known is not None and peak_tflops(device["name"]) == known
        ):
            if device["name"] != samples.device:  # a variant, with memory or links of its own
                tables.pop("samples", None)
            device["name"] = samples.device
            return tables
    return _of_no_device(samples)


def completed(samples: Samples, before: Samples | None) -> Samples:
    """`samples`, and those of `before` whose kind is not among them."""
    if before is None:
        return samples
    added = {
        "gemm": _missing(samples.gemm, before.gemm, lambda s: s.direction),
        "attention": _missing(samples.attention, before.attention, lambda s: s.backward),
        "memory": _missing(samples.memory, before.memory, lambda s: s.name),
        "collective": _missing(
            samples.collective, before.collective, lambda s: (s.link, s.transfer, s.ranks)
        ),
    }
    kinds = [kind for kind, rows in added.items() if rows]
    if not kinds:
        return samples
    rows = {kind: (*getattr(samples, kind), *added[kind]) for kind in kinds}
    source = f"{samples.source}; some of {', '.join(kinds)} before: {before.source}"
    return samples.model_copy(update={**rows, "source": source})


def _missing(
    have: Sequence[Row], before: Sequence[Row], kind: Callable[[Row], Hashable]
) -> tuple[Row, ...]:
    kinds = {kind(row) for row in have}
    return tuple(row for row in before if kind(row) not in kinds)


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
