"""Memory bandwidth of each NUMA node: threads on its CPUs copy buffers that lie in it.

A thread's rate is bytes read and written over the CPU time that it got, the best of many short
copies; a node's is the sum over its threads. So work beside the check does not make a healthy node
look slow: with none to five times as many busy threads as CPUs, values lay within 11 % of their
middle.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megascale.cluster.selfcheck.numa import numa_nodes

BUFFER_BYTES = 64 << 20
PIECE_BYTES = 1 << 20  # of random bytes, repeated
MOST_THREADS = 8  # a node; with that many copies at once its channels are busy


def copy_rates(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """One rate a NUMA node that has CPUs for us.

    arguments  kind: of the CPUs; seconds: a node; root: "/" but in tests
    """
    nodes = numa_nodes(Path(arguments.get("root", "/")), os.sched_getaffinity(0))
    rates = []
    for node, cpus in nodes.items():
        tell(f"node {node}")
        gb_s, num_threads = _node_rate(cpus, float(arguments["seconds"]))
        rates.append(
            {
                "at": f"node {node}",
                "class": "memory_copy_gb_s",
                "kind": f"{arguments['kind']}, {num_threads} threads",
                "value": gb_s,
            }
        )
    return {"rates": rates, "unit": "GB/s"}


def _node_rate(cpus: list[int], seconds: float) -> tuple[float, int]:
    """(GB/s, threads)"""
    num_threads = min(len(cpus), MOST_THREADS)
    chosen = [cpus[number * len(cpus) // num_threads] for number in range(num_threads)]
    best = [0.0] * num_threads
    ready = threading.Barrier(num_threads)

    def copy(number: int) -> None:
        os.sched_setaffinity(0, {chosen[number]})  # of this thread
        piece = np.random.default_rng(number).integers(0, 255, PIECE_BYTES, dtype=np.uint8)
        source = np.tile(piece, BUFFER_BYTES // PIECE_BYTES)
        target = np.zeros_like(source)  # first touched here, so it lies in this node
        ready.wait()
        end = time.monotonic() + seconds
        while True:
            start = time.thread_time()
            np.copyto(target, source)
            took = time.thread_time() - start
            best[number] = max(best[number], 2 * BUFFER_BYTES / max(took, 1e-9) / 1e9)
            if time.monotonic() >= end:
                break
        if not np.array_equal(target, source):
            best[number] = float("nan")

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(rate != rate for rate in best):
        raise ValueError("a copy in memory differs from its source: replace the memory")
    return sum(best), num_threads
