"""Measures links: pinned host memory, NCCL between the devices of a node, copy engines, and how
much a transfer and a matrix product slow each other.

Collectives are checked for values before they are timed. Times are the median of bursts, then the
maximum over ranks; a burst begins with all ranks together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.arena import Arena
from megascale.flux.machine import why_not_fused
from megascale.flux.timing import EagerTimer, HostTimer, Run, medians
from megascale.plan.machine.samples import CollectiveSample, OverlapSample
from megascale.plan.work.operations import Transfer

ROUNDS = 5
LOW = torch.bfloat16


def measure_host(sizes: Iterable[int], device: torch.device) -> list[CollectiveSample]:
    """Copies of a device to pinned host memory."""
    if device.type != "cuda":
        return []
    samples = []
    for num_bytes in sizes:
        there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        probe = EagerTimer(None).prepare(partial(there.copy_, here, non_blocking=True))
        seconds = statistics.median(probe() for _ in range(ROUNDS)) / 1e3
        samples.append(_sample(Transfer.SEND, 1, num_bytes, "host", seconds))
    return samples


def measure_collectives(
    sizes: Iterable[int], group: dist.ProcessGroup, device: torch.device
) -> list[CollectiveSample]:
    """All-gather, reduce-scatter, all-reduce and a send around the ring, of bf16."""
    clock = EagerTimer(group) if device.type == "cuda" else HostTimer(group)
    num_ranks = group.size()
    samples = []
    for num_bytes in sizes:
        elements = num_bytes // 2 // num_ranks * num_ranks
        if elements == 0:
            continue
        runs = _collectives(elements, group, device)
        times: dict[str, list[float]] = {}
        for name, run in runs.items():
            probe = clock.prepare(run)
            times[name] = [probe() for _ in range(ROUNDS)]
        for name, ms in medians(times, group).items():
            samples.append(_sample(Transfer(name), num_ranks, 2 * elements, "nvlink", ms / 1e3))
    return samples


def measure_copy_engines(
    sizes: Iterable[int], group: dist.ProcessGroup, device: torch.device
) -> list[CollectiveSample]:
    """Every rank pushes to the next through symmetric memory, all at once: no SM is used."""
    if device.type != "cuda" or why_not_fused(group, device):
        return []
    arena = Arena.of(group, device)
    largest = max(sizes)
    source = torch.zeros(largest, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {}
    with arena.turn(largest) as slot:
        peer = slot.data[(group.rank() + 1) % group.size()]
        for num_bytes in sizes:
            probe = EagerTimer(group).prepare(partial(peer[:num_bytes].copy_, source[:num_bytes]))
            times[str(num_bytes)] = [probe() for _ in range(ROUNDS)]
    return [
        _sample(Transfer.SEND, group.size(), int(num_bytes), "copy_engine", ms / 1e3)
        for num_bytes, ms in medians(times, group).items()
    ]


def _sample(
    transfer: Transfer, ranks: int, num_bytes: int, link: str, seconds: float
) -> CollectiveSample:
    values = {"transfer": transfer, "ranks": ranks, "num_bytes": num_bytes, "link": link}
    return CollectiveSample.model_validate({**values, "seconds": seconds})


def _collectives(elements: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Run]:
    """Calls by the name of their `Transfer`, their values checked."""
    num_ranks, rank = group.size(), group.rank()
    whole = torch.arange(elements, device=device).remainder(7).to(LOW)
    part = whole[: elements // num_ranks] + rank
    gathered, summed = torch.empty_like(whole), torch.empty_like(part)
    reduced = torch.ones_like(whole)
    came = torch.empty_like(whole)

    def send() -> None:
        operations = [
            dist.P2POp(dist.isend, whole, group=group, group_peer=(rank + 1) % num_ranks),
            dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - 1) % num_ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    runs: dict[str, Run] = {
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(summed, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(reduced, group=group),
        "send": send,
    }
    for run in runs.values():
        run()
    size = elements // num_ranks
    parts = [whole[:size] + other for other in range(num_ranks)]
    _check("all_gather", gathered, torch.cat(parts))
    _check("reduce_scatter", summed, num_ranks * whole[rank * size : (rank + 1) * size])
    _check("all_reduce", reduced, torch.full_like(reduced, num_ranks))
    _check("send", came, whole)
    reduced.zero_()  # it is reduced again and again, and must stay finite
    return runs


def _check(name: str, got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got, expected), f"{name}: wrong values"


def measure_overlap(group: dist.ProcessGroup | None, device: torch.device) -> list[OverlapSample]:
    """A product and a transfer beside it, against each alone: a copy to the host, and where there
    are peers NCCL and a copy engine's push."""
    if device.type != "cuda":
        return []
    size = 8192
    x, w = (torch.randn(size, size, device=device).to(LOW) for _ in range(2))
    y = torch.empty_like(x)
    num_bytes = 2**28
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    transfers: dict[str, Run] = {"host": lambda: there.copy_(source, non_blocking=True)}
    if group is not None:
        gathered = torch.empty(num_bytes * group.size(), dtype=torch.uint8, device=device)
        transfers["nvlink"] = lambda: dist.all_gather_into_tensor(gathered, source, group=group)
    product = partial(torch.mm, x, w, out=y)
    samples = [_side_by_side(product, name, run, device) for name, run in transfers.items()]
    if group is not None and not why_not_fused(group, device):
        with Arena.of(group, device).turn(num_bytes) as slot:
            peer = slot.data[(group.rank() + 1) % group.size()]
            push = partial(peer[:num_bytes].copy_, source)
            samples.append(_side_by_side(product, "copy_engine", push, device))
    return samples


def _side_by_side(compute: Run, name: str, transfer: Run, device: torch.device) -> OverlapSample:
    """Both for about 50 ms on streams of their own; each side's time while the other still ran."""
    alone = {"compute": _on_end(compute, device), "transfer": _on_end(transfer, device)}
    calls = {side: max(4, int(0.05 / seconds)) for side, seconds in alone.items()}
    side_stream = torch.cuda.Stream(device)
    marks = {side: _marks() for side in alone}
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side_stream):
        _record(transfer, 2 * calls["transfer"], marks["transfer"])  # outlasts the products
    _record(compute, calls["compute"], marks["compute"])
    torch.cuda.synchronize(device)
    beside_compute_s = _elapsed_s(marks["compute"]) / calls["compute"]
    torch.cuda.synchronize(device)
    _record(compute, 2 * calls["compute"], marks["compute"])
    with torch.cuda.stream(side_stream):
        _record(transfer, calls["transfer"], marks["transfer"])
    torch.cuda.synchronize(device)
    beside_transfer_s = _elapsed_s(marks["transfer"]) / calls["transfer"]
    return OverlapSample(
        compute="gemm",
        transfer=name,
        compute_slow_down=max(1.0, beside_compute_s / alone["compute"]),
        transfer_slow_down=max(1.0, beside_transfer_s / alone["transfer"]),
    )


def _on_end(run: Run, device: torch.device) -> float:
    marks = _marks()
    run()
    _record(run, 4, marks)
    torch.cuda.synchronize(device)
    num_calls = max(4, int(0.05 / (_elapsed_s(marks) / 4)))
    _record(run, num_calls, marks)
    torch.cuda.synchronize(device)
    return _elapsed_s(marks) / num_calls


def _marks() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _record(run: Run, num_calls: int, marks: tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
    marks[0].record()
    for _ in range(num_calls):
        run()
    marks[1].record()


def _elapsed_s(marks: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    return marks[0].elapsed_time(marks[1]) / 1e3
