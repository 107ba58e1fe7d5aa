"""What the copy engines of this machine do, on which the fused operators rest. Two GPUs.

    python -m benchmarks.flux_probe [--output FILE]

1. Which ways to set a 4-byte flag still make progress while a persistent grid that fills every SM
   spins on it: a copy, a memset, a stream write-value and a kernel; into the own memory and into
   the peer's; eager and inside a replayed graph (where the flag follows a transfer that outlasts
   the start of the grid). The kernel is the negative control: it cannot become resident.
2. Bandwidth of copies to (push) and from (pull) the peer, by size, both directions at once, idle
   and while a GEMM runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.arguments import writable_file
from megascale.env import installed_versions, switch_multicast_off
from megascale.flux.arena import Arena, Slot
from megascale.flux.signals import nanoseconds, read_flag

SIZES_KB = (64, 256, 1024, 4096, 16384, 65536, 262144)
PATIENCE_NS = 300_000_000  # a spin ends by itself, so that a starved flag is a result, not a hang


@triton.jit
def spin_on_all_sms(flag_ptr, result_ptr, PATIENCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the flag, at most PATIENCE ns. The result counts programs that saw it."""
    start = nanoseconds()
    seen = read_flag(flag_ptr)
    while (seen == 0) & (nanoseconds() - start < PATIENCE):
        seen = read_flag(flag_ptr)
    if seen != 0:
        tl.atomic_add(result_ptr, 1)


def main() -> None:
    """Run on GPUs 0 and 1; print and append rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    switch_multicast_off()
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        rows = manager.list()
        mp.spawn(_rank, (f"{folder}/store", rows), nprocs=2)
        for row in rows:
            row["commit"] = arguments.commit
            print(row["case"], row["metric"], round(row["value"], 1))
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def _rank(rank: int, store: str, rows: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2, device_id=None
    )
    group = dist.group.WORLD
    assert group is not None
    arena = Arena.of(group, torch.device("cuda", rank))
    found = [*_flags(arena), *_bandwidth(arena)]
    if rank == 0:
        rows.extend(found)
    dist.barrier()
    dist.destroy_process_group()


def _row(case: dict[str, Any], metric: str, value: float) -> dict[str, Any]:
    return {
        "bench": "flux-probe",
        "case": case,
        "metric": metric,
        "value": value,
        "device": torch.cuda.get_device_name(),
        "num_devices": 2,
        "dirty": False,
        "versions": installed_versions(("torch", "triton")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": "python -m benchmarks.flux_probe",
    }


# ---------------------------------------------------------------- flags beside a spinning grid


def _flags(arena: Arena) -> list[dict[str, Any]]:
    """1 where the flag was seen by every program of the grid, else 0."""
    rows = []
    programs = 2 * torch.cuda.get_device_properties(arena.device).multi_processor_count
    result = torch.zeros(1, dtype=torch.int32, device=arena.device)
    source = torch.randn(32 << 20, device=arena.device)
    with arena.turn(128 << 20) as slot:
        target = slot.view(1 - arena.rank, source.shape, source.dtype)
        for where in ("own", "peer"):
            for name, act in _ways(arena, slot, where).items():
                for mode in ("eager", "graph"):
                    flag = slot.flags[arena.rank][7:8]
                    flag.zero_()
                    result.zero_()
                    arena.barrier()
                    torch.cuda.synchronize()
                    run = _eager if mode == "eager" else _graph
                    run(flag, result, programs, act, source, target)
                    seen = int(result.item()) == programs
                    flag.zero_()
                    arena.barrier()
                    torch.cuda.synchronize()
                    case = {"probe": "flag", "way": name, "where": where, "mode": mode}
                    rows.append(_row(case, "progress", float(seen)))
    return rows


def _ways(arena: Arena, slot: Slot, where: str) -> dict[str, Callable[[], Any]]:
    import torch.distributed._symmetric_memory as symm_mem

    owner = arena.rank if where == "own" else 1 - arena.rank
    there = slot.flags[owner][7:8]
    handle = symm_mem._SymmetricMemory
    value = there.view(torch.uint32)
    return {
        "copy": lambda: there.copy_(arena.one[:1]),
        "memset": lambda: handle.memset32(value, 0, 1, 1),
        "write value": lambda: handle.stream_write_value32(value, 0, 1),
        "kernel": lambda: there.fill_(1),
    }


def _spin(flag: Tensor, result: Tensor, programs: int) -> None:
    spin_on_all_sms[(programs,)](flag, result, PATIENCE=PATIENCE_NS, num_warps=32)


def _eager(flag: Tensor, result: Tensor, programs: int, act: Callable[[], Any], *_: Tensor) -> None:
    other = torch.cuda.Stream()
    _warm(flag, result, programs, act)
    with torch.cuda.stream(other):
        _spin(flag, result, programs)
    time.sleep(0.01)  # the grid is resident
    with torch.cuda.stream(torch.cuda.Stream()):
        act()
    torch.cuda.synchronize()


def _graph(
    flag: Tensor,
    result: Tensor,
    programs: int,
    act: Callable[[], Any],
    source: Tensor,
    target: Tensor,
) -> None:
    _warm(flag, result, programs, act)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            for _ in range(8):  # 3 ms on a copy engine: the grid is resident before the flag
                target.copy_(source)
            act()
        _spin(flag, result, programs)
        current.wait_stream(other)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()


def _warm(flag: Tensor, result: Tensor, programs: int, act: Callable[[], Any]) -> None:
    """Load every kernel; leave flag and result as they were. Both ranks do the same."""
    act()
    torch.cuda.synchronize()
    dist.barrier()
    flag.fill_(1)
    _spin(flag, result, programs)
    torch.cuda.synchronize()
    dist.barrier()
    flag.zero_()
    result.zero_()
    torch.cuda.synchronize()
    dist.barrier()


# ---------------------------------------------------------------- bandwidth


def _bandwidth(arena: Arena) -> list[dict[str, Any]]:
    rows = []
    arena.reserve(SIZES_KB[-1] << 10)
    a, b = (torch.randn(8192, 8192, device=arena.device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    with arena.turn(SIZES_KB[-1] << 10) as slot:
        local = torch.empty(SIZES_KB[-1] << 10, dtype=torch.uint8, device=arena.device)
        peer = slot.data[1 - arena.rank]
        for kb in SIZES_KB:
            count = kb << 10
            for way, (to, from_) in {"push": (peer, local), "pull": (local, peer)}.items():
                for beside in ("idle", "gemm"):
                    times = [
                        _copy_ms(to[:count], from_[:count], beside, a, b, product) for _ in range(5)
                    ]
                    slowest = torch.tensor(statistics.median(times), device=arena.device)
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                    case = {"probe": "copy", "way": way, "kb": kb, "beside": beside}
                    rows.append(_row(case, "GB/s", count / float(slowest) / 1e6))
    return rows


def _copy_ms(
    to: Tensor, from_: Tensor, beside: str, a: Tensor, b: Tensor, product: Tensor
) -> float:
    """Milliseconds of a copy among several back to back."""
    copies = max(2, min(20, (64 << 20) // to.numel()))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if beside == "gemm":
        for _ in range(6):
            torch.mm(a, b, out=product)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)  # the GEMM runs, the queue is full
        begin.record()
        for _ in range(copies):
            to.copy_(from_)
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / copies


if __name__ == "__main__":
    main()
