"""How sure a plan is: the residuals of validation on the same device, as `residuals.toml` has them.

A residual is predicted / measured - 1 of a step's time, over rows that nothing was fitted on. They
are of a device and of the software that ran; how far a plan is from the largest of them is told
with it, as an interval from small runs says little about large ones.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import CATALOGUE, load_cluster
from megascale.plan.search.result import Confidence
from megascale.units import peak_tflops

_NINE_OF_TEN = 0.9


def confidence_of(cluster: Cluster) -> Confidence:
    """By the device of `cluster`, where its numbers are those that were compared."""
    name = device_row(cluster)
    if not _in_catalogue(cluster):
        why = f"{cluster.name}: its numbers are in no file of the catalogue"
        return Confidence(None, 0.0, 0, 0, why)
    found = _residuals().get(name)
    if found is None:
        return Confidence(None, 0.0, 0, 0, f"{name}: {cluster.device.gemm.source_of('share')}")
    return Confidence(
        share=found["share"],
        bias=found["bias"],
        num_rows=found["num_rows"],
        largest=found["largest"],
        source=found["source"],
    )


def _in_catalogue(cluster: Cluster) -> bool:
    """Whether device, links and network are a catalogue file's; sizes and names may differ."""
    prices = ("device", "nvlink", "network", "overlap")
    return any(
        all(getattr(cluster, part) == getattr(known, part) for part in prices)
        for known in map(load_cluster, CATALOGUE)
    )


def device_row(cluster: Cluster) -> str:
    """The device's name in `units.py`'s table; as it is where it has none."""
    row = peak_tflops(cluster.device.name)
    return row[1] if row else cluster.device.name


def summary(errors: list[float], gpus: list[int]) -> dict[str, float]:
    """What `residuals.toml` keeps of rows' errors: the share that nine of ten are within."""
    assert len(errors) == len(gpus) > 0, (len(errors), len(gpus))
    sizes = sorted(abs(error) for error in errors)
    within = sizes[min(len(sizes) - 1, int(_NINE_OF_TEN * len(sizes)))]
    return {
        "share": within,
        "bias": sum(errors) / len(errors),
        "num_rows": len(errors),
        "largest": max(gpus),
    }


@cache
def _residuals() -> dict[str, dict[str, Any]]:
    text = files("megascale.plan.search").joinpath("residuals.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
