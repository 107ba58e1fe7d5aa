"""Run a function on several gloo ranks inside a test.

Ranks are forked from a fork server that has imported torch and megascale and run nothing: a rank
costs hundredths of a second where a fresh interpreter costs seconds, and no thread pool of the test
process is inherited. It has imported no kernels: `tests/flux/shared_arena.py` says why.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

forkserver = mp.get_context("forkserver")
forkserver.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.distributed.checkpoint",
        "torch._dynamo",
        "pytest",
        "megascale.train.rank",  # nearly all of megascale: 0.2 s a rank
    ]
)


def _entry(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    cuda: bool,
    args: tuple[Any, ...],
    pipe: Any,
) -> None:
    gc.freeze()  # else a collection looks at all that was imported, and copies its pages: 0.4 s
    import torch
    import torch.distributed as dist

    from megascale.env import switch_multicast_off

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if cuda:
        switch_multicast_off()
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = fn(rank, world_size, *args)
        dist.barrier()
        pipe.send(("ok", result))
    except BaseException:  # noqa: BLE001 - the edge of the process: whatever it was is reported
        pipe.send(("error", (time.monotonic(), traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    cuda: bool = False,
) -> list[Any]:
    """Results of `fn(rank, world_size, *args)` of every rank, in order.

    `fn` is a module-level function with the default gloo group initialised (`cuda`: NCCL for CUDA
    tensors too, a device a rank). Results are pickled; tensors must be turned into lists or numpy,
    because a rank is gone before its shared memory could be opened.
    Raises AssertionError with the first failing rank's traceback, or naming the ranks that did not
    answer within `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            receiver, sender = forkserver.Pipe(duplex=False)
            process = forkserver.Process(
                target=_entry, args=(fn, rank, world_size, f"{folder}/store", cuda, args, sender)
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return _collect(ranks, timeout_s)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _collect(ranks: list[tuple[Any, Any]], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = [pipe for rank, (_, pipe) in enumerate(ranks) if rank not in results]
        ready = mp.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        missing = [rank for rank in range(len(ranks)) if rank not in results]
        failed: list[tuple[float, str, int]] = []
        assert ready, f"ranks {missing} of {len(ranks)} did not answer in {timeout_s} s"
        for rank in missing:
            pipe = ranks[rank][1]
            if pipe not in ready:
                continue
            try:
                status, value = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(ranks)} died without a word") from None
            results[rank] = value
            if status != "ok":
                failed.append((*value, rank))
        if failed:  # the first: others fail because it is gone, and are heard in the same moment
            _, told, rank = min(failed)
            raise AssertionError(f"rank {rank} of {len(ranks)} failed:\n{told}")
    return [results[rank] for rank in range(len(ranks))]
