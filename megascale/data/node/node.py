"""The memory of a node's loader and the process itself, at the end of the rank that owns them.

The memory is a memfd: it has no name, so nothing of it is left behind whoever is killed when, and
the size of /dev/shm does not bound it. Other ranks open it through this process
(`/proc/PID/fd/FD`). Its pages are allocated before anything starts: too little memory is an error
here and not a dead rank later.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megascale.config import RunConfig
from megascale.data.node.ring import Ring
from megascale.data.node.shape import RingShape, offsets
from megascale.data.prepared import Split
from megascale.env import child_environment, hostname
from megascale.errors import ConfigError
from megascale.units import format_bytes

_GRACE_S = 5.0  # for a loader whose input has ended
RingOf = tuple[Split, RingShape]


@dataclass(frozen=True)
class Place:
    """Where the ranks of a node find its loader.

    pid, descriptor  of the memory
    loader, started  process of the loader, and its start in the kernel's ticks
    """

    pid: int
    descriptor: int
    loader: int
    started: int


class NodeLoader:
    """A loader under way."""

    def __init__(
        self,
        config: RunConfig,
        rings: Sequence[RingOf],
        *,
        program: Sequence[str] = ("-m", "megascale.data.node.process"),
    ) -> None:
        """Raises ConfigError where the node has not the memory. `program`: of the interpreter."""
        shapes = [shape for _, shape in rings]
        self._descriptor = _allocate(offsets(shapes)[-1], config)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            memory = memoryview(mmap.mmap(self._descriptor, 0))
            for at, shape in zip(offsets(shapes), shapes, strict=False):
                ring = Ring(memory[at:], shape)
                ring.clear()
                ring.close()
            self._process = subprocess.Popen(
                [sys.executable, *program],
                stdin=subprocess.PIPE,
                pass_fds=(self._descriptor,),
                env=child_environment({"OMP_NUM_THREADS": "1"}),
            )
            self._tell(
                {
                    "config": config.model_dump(mode="json"),
                    "memory": self._descriptor,
                    "parent": os.getpid(),
                    "rings": [{"split": split, "shape": shape.to_json()} for split, shape in rings],
                }
            )
        except BaseException:
            self.close()
            raise
        started = start_of(self._process.pid)
        self.place = Place(os.getpid(), self._descriptor, self._process.pid, started or 0)

    def seek(self, ring: int, generation: int, first_sample: int) -> None:
        """Read `ring` from another position."""
        self._tell({"ring": ring, "generation": generation, "first_sample": first_sample})

    def ended(self) -> int | None:
        """The loader's exit code, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.poll()

    def close(self) -> None:
        """End the loader and give the memory back, once nobody maps it."""
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # it reads from what hangs
                self._process.wait()
            self._process = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _tell(self, order: dict[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone: who waits for a batch says so
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()


def start_of(pid: int) -> int | None:
    """When a process started, in ticks since boot; None where it is gone, or dead and not reaped.

    A process number is given again, a number and its start are not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _allocate(num_bytes: int, config: RunConfig) -> int:
    what = (
        f"data.prefetch {config.data.prefetch} with batches of {config.training.global_batch_size} "
        f"x {config.training.seq_len} tokens needs {format_bytes(num_bytes)} of shared memory on "
        f"{hostname()}"
    )
    advice = "lower data.prefetch, or set data.loader = 'rank' where a node's ranks are few"
    available = available_bytes()
    if num_bytes > available:
        raise ConfigError(f"{what}, {format_bytes(available)} are available; {advice}")
    descriptor = os.memfd_create("megascale-batches")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{what}: {error.strerror}; {advice}") from None
    return descriptor


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: the machine's, and its control groups'."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    machine = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    return min([machine, *_groups_rooms(root)])


def _groups_rooms(root: Path) -> Iterator[int]:
    """Limit less use of this process's control group, of version 2 and 1, and of the one that is
    the root here, which is the group of a container that shows no more. Pages of files that can be
    dropped are no use: reading the data must not make the next start seem too large."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:  # a kernel without them
        return
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if not controllers:
            top, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = "sys/fs/cgroup/memory"
        else:
            continue
        for group in {root / top, root / top / path.lstrip("/")}:
            with suppress(OSError, ValueError):  # not shown here, or without a limit ("max")
                limit, used = (int((group / name).read_text()) for name in names[:2])
                stat = dict(x.split()[:2] for x in (group / "memory.stat").read_text().splitlines())
                yield max(limit - used + int(stat.get(names[2], 0)), 0)
