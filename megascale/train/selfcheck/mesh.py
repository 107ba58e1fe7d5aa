"""Copies between every memory node and every GPU, both ways, and between every two GPUs.

A link that runs at half its width, or a GPU that hangs on the wrong socket, shows as one slow pair
(MegaScale 4.3's loopback test, for the host's side of the mesh). Host memory is pinned and lies in
the node: it is allocated by a thread on that node's CPUs. Near pairs are compared with near ones.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOST_BYTES, PEER_BYTES = 64 << 20, 256 << 20
COPIES = 4  # between two events


def run(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """A rate each ordered pair.

    arguments  repeats: the median of so many; nodes: memory node to its CPUs
    Raises ValueError where bytes came wrong.
    """
    nodes = {int(node): set(cpus) for node, cpus in arguments["nodes"].items()}
    repeats = int(arguments["repeats"])
    num_gpus = torch.cuda.device_count()
    rates: list[dict[str, Any]] = []
    kept: list[Tensor] = []  # pinned memory that is given back is given out again, wherever it lies
    allowed = os.sched_getaffinity(0)
    try:
        for node, cpus in nodes.items() if num_gpus else ():
            tell(f"pinned memory of node {node}")
            os.sched_setaffinity(0, cpus)
            host, back = (
                torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            )
            host.random_(generator=torch.Generator().manual_seed(node))
            kept += (host, back)
            for gpu in range(num_gpus):
                tell(f"node {node} and cuda:{gpu}")
                rates += _host_rates(node, gpu, host, back, repeats, several=len(nodes) > 1)
    finally:
        os.sched_setaffinity(0, allowed)
    for source in range(num_gpus):
        for target in range(num_gpus):
            if source != target:
                tell(f"cuda:{source} to cuda:{target}")
                rates.append(_peer_rate(source, target, repeats))
    return {"rates": rates, "unit": "GB/s", "gpus": num_gpus}


def _host_rates(
    node: int, gpu: int, host: Tensor, back: Tensor, repeats: int, several: bool
) -> list[dict[str, Any]]:
    """Both ways. several: there are other memory nodes, so this one may be far from the GPU"""
    device = torch.device("cuda", gpu)
    kind = torch.cuda.get_device_name(device)
    distance = "" if not several or numa_node(device) in (node, None) else "_far"
    back.zero_()
    there = torch.zeros(HOST_BYTES, dtype=torch.uint8, device=device)
    down = _rate(there, host, device, repeats)
    up = _rate(back, there, device, repeats)
    if not torch.equal(back, host):
        raise ValueError(f"bytes copied between node {node} and {device} came wrong")
    return [
        {
            "at": f"node {node} to {device}",
            "class": f"copy_to_gpu{distance}_gb_s",
            "kind": kind,
            "value": down,
        },
        {
            "at": f"{device} to node {node}",
            "class": f"copy_from_gpu{distance}_gb_s",
            "kind": kind,
            "value": up,
        },
    ]


def _peer_rate(source: int, target: int, repeats: int) -> dict[str, Any]:
    here, there = torch.device("cuda", source), torch.device("cuda", target)
    generator = torch.Generator(here).manual_seed(source * 64 + target)
    data = torch.randint(0, 255, (PEER_BYTES,), generator=generator, dtype=torch.uint8, device=here)
    got = torch.zeros(PEER_BYTES, dtype=torch.uint8, device=there)
    rate = _rate(got, data, here, repeats)
    returned = torch.zeros_like(data)
    returned.copy_(got)
    if not torch.equal(returned, data):
        raise ValueError(f"bytes copied from {here} to {there} came wrong")
    staged = "" if torch.cuda.can_device_access_peer(here, there) else "_staged"
    return {
        "at": f"{here} to {there}",
        "class": f"copy_peer{staged}_gb_s",
        "kind": torch.cuda.get_device_name(here),
        "value": rate,
    }


def _rate(target: Tensor, source: Tensor, device: torch.device, repeats: int) -> float:
    """GB/s, the median over `repeats` rounds after one; timed on a stream of `device`."""
    seconds = []
    with torch.cuda.device(device):
        for number in range(repeats + 1):
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)
            done.record()
            done.synchronize()
            if number:
                seconds.append(begin.elapsed_time(done) * 1e-3)
    return COPIES * source.numel() / statistics.median(seconds) / 1e9


def numa_node(device: torch.device, root: Path = Path("/")) -> int | None:
    """The memory node that a GPU hangs on; None where the machine does not say."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        place = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
            f":{properties.pci_device_id:02x}.0"
        )
        found = int((root / "sys/bus/pci/devices" / place / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return found if found >= 0 else None
