"""The samples that a run's configuration names, opened by whoever reads them: a rank, or the one
loader of a node (`data/node/process.py`). No torch."""

from __future__ import annotations

from megascale.config import RunConfig
from megascale.data.mixture import Mixture, SampleOrder, ShuffledSamples, shares_of
from megascale.data.prepared import Split
from megascale.data.samples import Dataset, PackedDataset, SyntheticDataset


def open_dataset(config: RunConfig, split: Split, folder: str | None = None) -> Dataset:
    """The samples of one split, of `data.path` or of another `folder`.

    Raises DataError where they are missing, damaged or fewer than one.
    """
    training, data = config.training, config.data
    if data.synthetic:
        seed = training.seed + (split == "valid")
        return SyntheticDataset(config.model.vocab, training.seq_len, seed)
    folder = data.path if folder is None else folder
    return PackedDataset(
        folder,
        split,
        training.seq_len,
        data.packing,
        data.mask_end_of_document,
        data.document_mask,
    )


def open_order(config: RunConfig, split: Split) -> SampleOrder:
    """The samples of one split in the order in which the run counts them.

    Both splits of a mixture have its shares.
    """
    seed, mixture = config.training.seed, config.data.mixture
    if not mixture:
        return ShuffledSamples(open_dataset(config, split), seed)
    parts = [open_dataset(config, split, part.path) for part in mixture]
    return Mixture(parts, [part.weight for part in mixture], seed)


def open_held_out(config: RunConfig) -> list[SampleOrder]:
    """The held-out samples of each part of a mixture, or of the whole."""
    order = open_order(config, "valid")
    return list(order.parts) if isinstance(order, Mixture) else [order]


def held_out_batches(config: RunConfig) -> list[int]:
    """Global batches of a validation by part: its share of them, and at least one."""
    num, mixture = config.validation.batches, config.data.mixture
    if not mixture:
        return [num]
    return [max(1, round(share * num)) for share in shares_of([part.weight for part in mixture])]
