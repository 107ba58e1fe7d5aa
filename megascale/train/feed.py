"""Who reads a run's samples: each rank for itself, or one loader a node (MegaScale 3.4).

Ranks of one node find each other by what names a machine to all of them: host name, boot id, and
process namespace (ranks that do not see each other's processes cannot share memory through them).
The lowest of them owns the loader. Which samples a step has does not depend on who reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megascale.config import RunConfig
from megascale.config.data import MOST_AHEAD
from megascale.data import BatchSource, GlobalBatch
from megascale.data.node.filling import training_positions, validation_positions
from megascale.data.node.node import NodeLoader, Place, RingOf
from megascale.data.node.shape import RingShape, offsets
from megascale.data.node.source import NodeBatches, NodeMemory
from megascale.data.opening import held_out_batches
from megascale.env import hostname
from megascale.errors import ConfigError, LaunchError, MegascaleError
from megascale.topology import Coordinates, Mesh
from megascale.train.corpus import make_loader
from megascale.units import format_bytes

logger = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Feed(Protocol):
    """Where batches come from."""

    def steps(self, consumed_samples: int) -> BatchSource:
        """Training steps from a data position on; what was read from another is thrown away."""

    def held_out(self) -> Iterator[GlobalBatch] | None:
        """The batches of validation after validation; None: who validates reads them."""

    def close(self) -> None: ...


class RankFeed:
    """This rank reads for itself."""

    def __init__(self, config: RunConfig, mesh: Mesh, global_rank: int) -> None:
        self._config, self._mesh, self._place = config, mesh, mesh.coordinates(global_rank)

    def steps(self, consumed_samples: int) -> BatchSource:
        return make_loader(self._config, self._mesh, self._place, consumed_samples)

    def held_out(self) -> Iterator[GlobalBatch] | None:
        return None

    def close(self) -> None:
        """What `steps` gave is closed by who uses it."""


class NodeFeed:
    """This rank copies from its node's loader; `loader` where it owns it."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        global_rank: int,
        memory: NodeMemory,
        loader: NodeLoader | None,
    ) -> None:
        self.memory, self.loader = memory, loader
        self._config, self._rank = config, global_rank
        self._dp_rank = mesh.coordinates(global_rank).dp_rank
        self._generation = 0
        self._held_out: NodeBatches | None = None
        if config.validation.interval:
            size = config.training.global_batch_size
            positions = validation_positions(held_out_batches(config), size)
            self._held_out = self._batches(1, 1, positions, 0)

    def steps(self, consumed_samples: int) -> BatchSource:
        self._generation += 1
        positions = training_positions(self._config.training.global_batch_at, consumed_samples)
        return self._batches(0, self._generation, positions, consumed_samples)

    def held_out(self) -> Iterator[GlobalBatch] | None:
        return self._held_out

    def close(self) -> None:
        self.memory.close()
        if self.loader is not None:
            self.loader.close()

    def _batches(
        self, ring: int, generation: int, positions: Iterator[tuple[int, int, int]], first: int
    ) -> NodeBatches:
        if self.loader is not None:
            self.loader.seek(ring, generation, first)
        return NodeBatches(
            self.memory,
            self.memory.rings[ring],
            generation,
            positions,
            global_rank=self._rank,
            dp_rank=self._dp_rank,
        )


def open_feed(config: RunConfig, mesh: Mesh, place: Coordinates) -> Feed:
    """Collective over all ranks: each of a node with a loader is attached to it when this returns.

    Raises the same error on all ranks where one could not start its loader or attach to it.
    """
    wanted = config.data.loader
    global_rank = mesh.global_rank(
        tp_rank=place.tp_rank, dp_rank=place.dp_rank, pp_rank=place.pp_rank
    )
    if wanted == "rank" or (
        wanted == "auto" and (mesh.world_size == 1 or not config.data.prefetch)
    ):
        return RankFeed(config, mesh, global_rank)
    machine = f"{hostname()} {_text(_BOOT_ID)} {_process_namespace()}"
    machines = _agree(lambda: machine, mesh)
    ranks = [rank for rank, name in enumerate(machines) if name == machine]
    shares = wanted == "node" or len(ranks) > 1
    owns = shares and global_rank == ranks[0]
    rings = _rings(config, mesh, ranks)
    loader: NodeLoader | None = None

    def start() -> Place | None:
        nonlocal loader
        if owns:
            _check_ahead(config)
            loader = NodeLoader(config, rings)
        return None if loader is None else loader.place

    def attach() -> NodeMemory | None:
        found = places[ranks[0]]
        if found is None:
            return None
        deadline_s = config.comm.timeout_s / 2  # before peers say only that this rank is late
        ended = (lambda: None) if loader is None else loader.ended
        shapes = [shape for _, shape in rings]
        return NodeMemory(found, shapes, ranks, deadline_s=deadline_s, ended=ended)

    memory: NodeMemory | None = None
    try:
        places = _agree(start, mesh)

        def attached() -> None:
            nonlocal memory
            memory = attach()

        _agree(attached, mesh)
    except BaseException:
        if loader is not None:
            loader.close()
        raise
    if memory is None:
        return RankFeed(config, mesh, global_rank)
    if owns:
        _tell(rings, memory)
    return NodeFeed(config, mesh, global_rank, memory, loader)


def _rings(config: RunConfig, mesh: Mesh, ranks: list[int]) -> list[RingOf]:
    """Of training, and of validation where there is one."""
    training = config.training

    def shape(num_slots: int) -> RingShape:
        return RingShape(
            num_slots=min(num_slots, MOST_AHEAD + 1),
            num_readers=len(ranks),
            dp_ranks=tuple(sorted({mesh.coordinates(rank).dp_rank for rank in ranks})),
            dp_size=mesh.data,
            micro_batch_size=training.micro_batch_size,
            num_rows=max(training.batch_sizes()) // mesh.data,
            seq_len=training.seq_len,
            has_documents=config.data.document_mask,
        )

    ahead = config.data.prefetch + 1
    rings: list[RingOf] = [("train", shape(ahead))]
    if config.validation.interval:
        rings.append(("valid", shape(min(ahead, sum(held_out_batches(config))))))
    return rings


def _check_ahead(config: RunConfig) -> None:
    if config.data.prefetch > MOST_AHEAD:
        raise ConfigError(
            f"data.prefetch is {config.data.prefetch}, and the loader of a node reads at most "
            f"{MOST_AHEAD} global batches ahead; lower it, or set data.loader = 'rank'"
        )


def _tell(rings: list[RingOf], memory: NodeMemory) -> None:
    shapes = [shape for _, shape in rings]
    logger.info(
        "data: process %d reads for ranks %d to %d of %s, once for each of %d data ranks, into "
        "%s of shared memory (%s)",
        memory.place.loader,
        memory.ranks[0],
        memory.ranks[-1],
        hostname(),
        len(shapes[0].dp_ranks),
        format_bytes(offsets(shapes)[-1]),
        ", ".join(f"{split}: {shape.num_slots} batches" for split, shape in rings),
    )


def _agree(part: Callable[[], Any], mesh: Mesh) -> list[Any]:
    """Run `part` on every rank; all results by rank, or the first rank's error on all."""
    value: Any = None
    failed: tuple[type[MegascaleError], str] | None = None
    cause: Exception | None = None
    try:
        value = part()
    except MegascaleError as error:
        cause, failed = error, (type(error), str(error))
    except OSError as error:  # no process, no descriptor
        cause, failed = error, (LaunchError, f"the loader of its node did not start: {error}")
    outcomes: list[tuple[Any, tuple[type[MegascaleError], str] | None]] = [(value, failed)]
    own = 0
    if mesh.world_size > 1:
        own = dist.get_rank()
        outcomes = [(None, None)] * mesh.world_size
        dist.all_gather_object(outcomes, (value, failed))
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, message = failure
            said = "" if rank == own else f"as rank {rank} said: "
            raise kind(said + message) from cause
    return [value for value, _ in outcomes]


def _process_namespace() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
