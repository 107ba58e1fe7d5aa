"""The loss on held-out samples: of the whole, and of each part of a mixture.

A mixture's parts are read apart, each with its share of `validation.batches` (at least one): the
whole's loss is the parts' losses by their exact shares, without the chance of which samples a few
mixed batches would hold, and the loss of each part costs nothing more.

Invariant: the same samples at every validation and in every layout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megascale.config import RunConfig
from megascale.data import GlobalBatch, GlobalBatchLoader, SampleOrder, shares_of
from megascale.data.opening import held_out_batches, open_held_out
from megascale.topology import Coordinates, Mesh
from megascale.train.assemble import Assembly
from megascale.train.corpus import unigram_entropy_nats
from megascale.train.step import validation_loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """This data rank's share of the samples of one part; `name` is empty where it is the whole."""

    name: str
    share: float
    batches: Iterable[GlobalBatch]


def held_out(
    config: RunConfig,
    mesh: Mesh,
    place: Coordinates,
    source: Iterator[GlobalBatch] | None = None,
) -> list[HeldOut]:
    """What a validation needs, to be gone through in order. Raises DataError.

    source  where a node's loader has read it; None: it is read here
    """
    counts = held_out_batches(config)
    batches: list[Iterable[GlobalBatch]]
    if source is None:
        orders = open_held_out(config)
        batches = [
            _read(config, order, count, mesh, place)
            for order, count in zip(orders, counts, strict=True)
        ]
    else:
        batches = [islice(source, count) for count in counts]
    if not config.data.mixture:
        return [HeldOut("", 1.0, batches[0])]
    shares = shares_of([part.weight for part in config.data.mixture])
    names = _names(config.data.folders)
    return [
        HeldOut(name, float(share), of_part)
        for name, share, of_part in zip(names, shares, batches, strict=True)
    ]


def validate(assembly: Assembly, parts: list[HeldOut]) -> tuple[float, dict[str, float]]:
    """(loss of the whole, loss by the name of a part, where there are parts). Collective."""
    losses = [
        validation_loss(assembly, (batch.micro_batches for batch in part.batches)) for part in parts
    ]
    whole = sum(part.share * loss for part, loss in zip(parts, losses, strict=True))
    return whole, {part.name: x for part, x in zip(parts, losses, strict=True) if part.name}


def _read(
    config: RunConfig, order: SampleOrder, num_batches: int, mesh: Mesh, place: Coordinates
) -> list[GlobalBatch]:
    size = config.training.global_batch_size
    loader = GlobalBatchLoader(
        order,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=place.dp_rank,
        dp_size=mesh.data,
        batch_size_at=lambda _consumed: size,
        prefetch=0,
    )
    batches = [loader.read(i * size, size) for i in range(num_batches)]
    loader.close()
    return batches


def _names(folders: tuple[str, ...]) -> list[str]:
    """The last part of each folder's path, or the paths where two end alike."""
    names = [Path(folder).name for folder in folders]
    return names if len({*names}) == len(names) else list(folders)


def compare_with_unigrams(config: RunConfig, loss: float) -> None:
    """Say what a validation's loss is beside that of a model which knows frequencies alone."""
    entropy = unigram_entropy_nats(config)
    if entropy is not None:
        logger.info(
            "validation loss %.3f nats, %.3f %s the unigram entropy %.3f of the training split",
            loss,
            abs(entropy - loss),
            "under" if loss <= entropy else "over",
            entropy,
        )
