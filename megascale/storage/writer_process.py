"""The process that moves a trainer's bytes: `python -m megascale.storage.writer_process`.

A process and not a thread: the trainer's interpreter launches kernels, and what hashes and writes
in it takes turns with that. No torch here, so it starts in a tenth of a second and stays small:
what it writes lies in the trainer's shared memory and goes to the disk from there, uncopied.

Lines of JSON: a job on stdin; on stdout {"moved": bytes} as often as something moved, then one
{"written": ...} or {"error": text}.

It dies with the process that started it: a pidfd of that process tells. (PR_SET_PDEATHSIG would
fire when the *thread* that started it ends; a closed stdin does not tell while a forked child of
the trainer holds the other end.) Signals that a terminal or a launcher sends to the whole group are
the trainer's to judge.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, BinaryIO

from megascale.errors import MegascaleError, StorageError
from megascale.storage.blocks import blocks_in_order, hash_view, num_hashing_threads, sha256
from megascale.storage.interface import FileJob, Storage, Written
from megascale.storage.opening import open_storage

Moved = Callable[[int], None]


def main() -> None:
    parent_pid, stall_s = int(sys.argv[1]), float(sys.argv[2])
    die_with(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    serve(sys.stdin.buffer, replies, stall_s)


def die_with(pid: int) -> None:
    """End this process when process `pid`, which started it, ends."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        os._exit(1)
    if os.getppid() != pid:
        os._exit(1)

    def wait() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="dies-with-parent").start()


def serve(jobs: BinaryIO, replies: BinaryIO, stall_s: float) -> None:
    """Do each job until there are no more."""

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content).encode() + b"\n")

    for line in jobs:
        job = json.loads(line)
        try:
            written = _do(job, stall_s, lambda num_bytes: reply({"moved": num_bytes}))
        except MegascaleError as error:
            reply({"error": str(error)})
        except Exception as error:  # noqa: BLE001  between processes: the trainer waits for a word
            reply({"error": f"the process that writes files failed: {error!r}"})
        else:
            reply({"written": asdict(written)})


def _do(job: dict[str, Any], stall_s: float, moved: Moved) -> Written:
    if job["kind"] == "copy":
        source = open_storage(job["source_url"], stall_s=stall_s)
        target = open_storage(job["target_url"], stall_s=stall_s)
        return copy_file(source, target, job["name"], job["header_bytes"], moved)
    fields = {**job["job"], "header": base64.b64decode(job["job"]["header"])}
    file_job = FileJob(**fields)
    return write_file(open_storage(file_job.url, stall_s=stall_s), file_job, moved)


def write_file(storage: Storage, job: FileJob, moved: Moved) -> Written:
    """Header and mapped bytes go out while other threads hash them."""
    began_s = time.monotonic()
    total_bytes = len(job.header) + job.num_bytes
    refuse_without_room(storage, job.name, total_bytes)
    with (
        _mapped(job.source, job.source_start, job.num_bytes) as values,
        ThreadPoolExecutor(num_hashing_threads(), thread_name_prefix="hashes") as pool,
    ):
        blocks = hash_view(values, pool)
        try:
            storage.write(job.name, [memoryview(job.header), values], moved)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return Written(
            total_bytes,
            sha256(job.header),
            tuple(block.result() for block in blocks),
            time.monotonic() - began_s,
        )


def copy_file(
    source: Storage,
    target: Storage,
    name: str,
    header_bytes: int,
    moved: Moved,
    *,
    target_name: str | None = None,
) -> Written:
    """A file of `source` to `target`, there `target_name` or the same; the hashes are of what was
    read."""
    began_s = time.monotonic()
    num_bytes = source.size(name)
    if num_bytes is None:
        raise StorageError(f"{source.url} has no {name}; nothing was copied")
    refuse_without_room(target, target_name or name, num_bytes)
    hashes: list[str] = []
    target.write(
        target_name or name,
        blocks_in_order(source, name, min(header_bytes, num_bytes), num_bytes, hashes),
        moved,
    )
    return Written(num_bytes, hashes[0], tuple(hashes[1:]), time.monotonic() - began_s)


def refuse_without_room(storage: Storage, name: str, num_bytes: int) -> None:
    free_bytes = storage.free_bytes()
    if free_bytes is not None and free_bytes < num_bytes:
        raise StorageError(
            f"writing {name} to {storage.url}: the disk is full: {num_bytes:,} bytes are needed, "
            f"{free_bytes:,} are free; free space or lower checkpoint.keep_latest_k. Nothing was "
            "written, older checkpoints are untouched, training can go on"
        )


@contextmanager
def _mapped(path: str, start: int, num_bytes: int) -> Iterator[memoryview]:
    """The bytes of a file that can be mapped, shared, not read in advance."""
    if not num_bytes:
        yield memoryview(b"")
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size < start + num_bytes:
            raise StorageError(
                f"{path} has {size:,} bytes, {start + num_bytes:,} are to be written"
            )
        mapped = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ, offset=start)
    finally:
        os.close(descriptor)
    view = memoryview(mapped)
    try:
        yield view
    finally:
        # After a stall a thread still holds a part of it: then the mapping goes with the process.
        with suppress(BufferError):
            view.release()
            mapped.close()


if __name__ == "__main__":
    main()
