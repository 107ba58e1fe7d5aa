"""What a run trains on: the prepared folder, its tokenizer, its loaders. No torch."""

from __future__ import annotations

from pathlib import Path

from megascale.config import RunConfig
from megascale.data import (
    Dataset,
    GlobalBatch,
    GlobalBatchLoader,
    PackedDataset,
    SyntheticDataset,
    open_prepared,
)
from megascale.data.prepared import Split
from megascale.errors import ConfigError
from megascale.topology import Coordinates, Mesh


def resolve_vocabulary(config: RunConfig) -> RunConfig:
    """Open the data once: its tokenizer fixes the vocabulary where the recipe leaves it out.

    Raises DataError or ConfigError for data that is missing, damaged, or does not fit the model.
    """
    model = config.model
    if config.data.synthetic:
        if model.vocab_size is None:
            raise ConfigError(
                "model.vocab_size is not given and synthetic data has no tokenizer to take it "
                "from; set model.vocab_size"
            )
        return config
    prepared = open_prepared(config.data.path, vocab_size=model.vocab_size)
    make_dataset(config, "train")
    if config.validation.interval:
        make_dataset(config, "valid")
    if model.vocab_size is not None:
        return config
    sized = model.model_copy(update={"vocab_size": prepared.meta.vocab_size})
    return config.model_copy(update={"model": sized})


def tokenizer_files(config: RunConfig) -> list[Path]:
    """The tokenizer's files, to keep with the run."""
    if config.data.synthetic:
        return []
    folder = Path(config.data.path)
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def unigram_entropy_nats(config: RunConfig) -> float | None:
    """Loss of the best model that ignores context, on the training split; the bar to be under."""
    if config.data.synthetic:
        return None
    return open_prepared(config.data.path).meta.unigram_entropy_nats


def data_identity(config: RunConfig) -> dict[str, str]:
    """What a checkpoint remembers of the data, wherever the files lie.

    documents, tokenizer   fingerprints
    split                  what went where: with these documents it fixes every sample
    """
    if config.data.synthetic:
        return dict.fromkeys(("documents", "tokenizer", "split"), "synthetic")
    meta = open_prepared(config.data.path).meta
    tokens = " + ".join(f"{split.tokens} {name}" for name, split in sorted(meta.splits.items()))
    return {
        "documents": meta.documents_sha256,
        "tokenizer": meta.tokenizer_sha256,
        "split": f"{tokens} tokens, fraction {meta.validation_fraction}, seed {meta.seed}",
    }


def make_dataset(config: RunConfig, split: Split) -> Dataset:
    """The samples of one split."""
    training, data = config.training, config.data
    if data.synthetic:
        seed = training.seed + (split == "valid")
        return SyntheticDataset(config.model.vocab, training.seq_len, seed)
    return PackedDataset(
        data.path, split, training.seq_len, data.packing, data.mask_end_of_document
    )


def make_loader(
    config: RunConfig, mesh: Mesh, place: Coordinates, consumed_samples: int
) -> GlobalBatchLoader:
    """Training steps of this data rank from a data position on."""
    training = config.training
    return GlobalBatchLoader(
        make_dataset(config, "train"),
        seed=training.seed,
        micro_batch_size=training.micro_batch_size,
        dp_rank=place.dp_rank,
        dp_size=mesh.data,
        batch_size_at=training.global_batch_at,
        consumed_samples=consumed_samples,
        prefetch=config.data.prefetch,
    )


def validation_batches(config: RunConfig, mesh: Mesh, place: Coordinates) -> list[GlobalBatch]:
    """The same held-out samples at every validation and in every layout."""
    size = config.training.global_batch_size
    loader = GlobalBatchLoader(
        make_dataset(config, "valid"),
        seed=config.training.seed,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=place.dp_rank,
        dp_size=mesh.data,
        batch_size_at=lambda _consumed: size,
        prefetch=0,
    )
    batches = [loader.read(i * size, size) for i in range(config.validation.batches)]
    loader.close()
    return batches
