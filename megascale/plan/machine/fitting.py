"""Curves fitted on samples: what a cluster file says beside the samples themselves.

Each is the least mean absolute error of the logarithm, so that neither one bad sample nor the
largest sizes decide. The corrections of `sampled.py` then start from a curve that is already near.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import log
from statistics import median
from typing import TypeVar

from megascale.plan.machine.device import Device
from megascale.plan.machine.links import NodeLink, inside_s
from megascale.plan.machine.minimise import Numbers, minimise
from megascale.plan.machine.sampled import attention_of
from megascale.plan.machine.samples import (
    AttentionSample,
    CollectiveSample,
    GemmSample,
    MemorySample,
    OverlapSample,
)
from megascale.plan.work.operations import Attention, Direction, Gemm, Transfer

Sample = TypeVar("Sample")

_MOST_SAMPLES = 240
_GEMM_BOUNDS = {
    "share": (0.2, 1.0),
    "half_depth": (0.0, 600.0),
    "tile_loss": (0.0, 64.0),
    "storing": (0.0, 1.2),
    "rounding": (0.0, 1.0),
    "dgrad": (0.7, 1.2),
    "wgrad": (0.7, 1.2),
}
_ATTENTION_BOUNDS = {
    "forward": (0.05, 1.0),
    "backward": (0.05, 1.0),
    "block": (0.0, 4096.0),
    "half_head_dim": (0.0, 128.0),
    "half_heads": (0.0, 64.0),
}


def fit_gemm(device: Device, samples: Sequence[GemmSample]) -> Numbers:
    """Numbers of the device's `gemm` that the samples tell; empty where they tell nothing."""
    gemms = [
        (Gemm("", s.rows, s.columns, s.depth, s.direction), s.seconds - device.gemm.floor_s)
        for s in _thinned(samples)
        if s.seconds > 2 * device.gemm.floor_s
    ]
    gemms = [(g, s) for g, s in gemms if device.matrix_s(g) > device.traffic_s(g)]
    if len(gemms) < len(_GEMM_BOUNDS):
        return {}
    told = {gemm.direction for gemm, _ in gemms}
    needs = {"dgrad": Direction.DGRAD, "wgrad": Direction.WGRAD, "storing": Direction.WGRAD}
    bounds = {n: bound for n, bound in _GEMM_BOUNDS.items() if needs.get(n) in {None, *told}}
    peak, speed, num_sms = device.peak_flops(), device.reached_bytes_per_s, device.num_sms

    def loss(numbers: Numbers) -> float:
        curve = device.gemm.model_copy(update=numbers)
        errors = [log(curve.matrix_s(gemm, peak, speed, num_sms) / s) for gemm, s in gemms]
        return sum(map(abs, errors)) / len(errors)

    return minimise(loss, device.gemm.model_dump(include=set(bounds)), bounds)


def fit_attention(device: Device, samples: Sequence[AttentionSample]) -> Numbers:
    """Numbers of the device's `attention` that the samples tell."""
    cores: list[tuple[Attention, float]] = [
        (attention_of(s), s.seconds - device.attention.floor_s)
        for s in _thinned(samples)
        if s.seconds > 2 * device.attention.floor_s
    ]
    told: set[str] = {"backward" if core.backward else "forward" for core, _ in cores}
    bounds = {name: _ATTENTION_BOUNDS[name] for name in sorted(told)}
    if len({core.seq_len for core, _ in cores}) > 1:
        bounds["block"] = _ATTENTION_BOUNDS["block"]
    if len({core.head_dim for core, _ in cores}) > 1:
        bounds["half_head_dim"] = _ATTENTION_BOUNDS["half_head_dim"]
    if len({core.sequences * core.heads for core, _ in cores}) > 1:
        bounds["half_heads"] = _ATTENTION_BOUNDS["half_heads"]
    if not told:
        return {}

    def loss(numbers: Numbers) -> float:
        curve = device.attention.model_copy(update=numbers)
        errors = [log(curve.matrix_s(core, device.peak_flops()) / s) for core, s in cores]
        return sum(map(abs, errors)) / len(errors)

    return minimise(loss, device.attention.model_dump(include=set(bounds)), bounds)


def fit_memory(device: Device, samples: Sequence[MemorySample]) -> Numbers:
    """Share of the peak: of the largest copy, else of the fastest of the largest passes."""
    if not samples:
        return {}
    copies = [s for s in samples if s.name == "copy"] or list(samples)
    largest = max(s.num_bytes for s in copies)
    rates = [s.num_bytes / s.seconds for s in copies if s.num_bytes >= largest / 2]
    return {"share": min(1.0, max(rates) / device.bytes_per_s)}


def fit_links(nvlink: NodeLink, samples: Sequence[CollectiveSample]) -> Numbers:
    """Shares, base and step of transfers in a node; the copy engines' share."""
    numbers: Numbers = {}
    copies = [s for s in samples if s.link == "copy_engine"]
    if copies:
        largest = max(s.num_bytes for s in copies)
        rates = [s.num_bytes / s.seconds for s in copies if s.num_bytes == largest]
        numbers["copy_engine"] = min(1.0, median(rates) / (nvlink.gb_s * 1e9))
    rings = [s for s in samples if s.link == "nvlink" and s.ranks > 1]
    told = sorted({str(s.transfer) for s in rings})
    if not told:
        return numbers
    bounds = dict.fromkeys(told, (0.02, 1.0))
    bounds["base_s"] = (1e-6, 100e-6)
    if len({s.ranks for s in rings if s.transfer is not Transfer.SEND}) > 1:
        bounds["step_s"] = (0.2e-6, 20e-6)

    def loss(tried: Numbers) -> float:
        link = nvlink.model_copy(update=tried)
        errors = [log(inside_s(link, s.transfer, s.num_bytes, s.ranks) / s.seconds) for s in rings]
        return sum(map(abs, errors)) / len(errors)

    return numbers | minimise(loss, nvlink.model_dump(include=set(bounds)), bounds)


def fit_overlap(samples: Sequence[OverlapSample]) -> Numbers:
    """Slow-downs by link: the median of those beside products, else beside anything."""
    numbers: Numbers = {}
    for link in ("nvlink", "network", "copy_engine"):
        of_link = [s for s in samples if _link_of(s.transfer) == link]
        beside = [s for s in of_link if s.compute == "gemm"] or of_link
        if beside:
            numbers[f"compute_{link}"] = max(1.0, median(s.compute_slow_down for s in beside))
            numbers[f"transfer_{link}"] = max(1.0, median(s.transfer_slow_down for s in beside))
    return numbers


def _link_of(transfer: str) -> str:
    """Link of an `OverlapSample.transfer`: its own name, or that of a collective over NVLink."""
    return "nvlink" if transfer in set(Transfer) else transfer


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Some of them, always the same ones, so that a fit takes seconds."""
    if len(samples) <= _MOST_SAMPLES:
        return samples
    return random.Random(0).sample(list(samples), _MOST_SAMPLES)
