"""What a run trains on: the prepared folders, their tokenizer, its loaders. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megascale.config import RunConfig
from megascale.data import (
    GlobalBatchLoader,
    Meta,
    open_parts,
    shares_of,
)
from megascale.data.opening import open_order
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
    first = open_parts(config.data.folders, model.vocab_size)[0]
    open_order(config, "train")
    if config.validation.interval:
        open_order(config, "valid")
    if model.vocab_size is not None:
        return config
    sized = model.model_copy(update={"vocab_size": first.meta.vocab_size})
    return config.model_copy(update={"model": sized})


def tokenizer_files(config: RunConfig) -> list[Path]:
    """The tokenizer's files, to keep with the run."""
    if config.data.synthetic:
        return []
    folder = Path(config.data.folders[0])
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def unigram_entropy_nats(config: RunConfig) -> float | None:
    """Loss of the best model that ignores context, on the training split; the bar to be under.

    Of a mixture: the parts' entropies, weighted by their shares. It is the loss of the best model
    that knows no more than which part it reads, at most the entropy of the mixed tokens, and needs
    no counts.
    """
    data = config.data
    if data.synthetic:
        return None
    entropies = [part.meta.unigram_entropy_nats for part in open_parts(data.folders)]
    if not data.mixture:
        return entropies[0]
    shares = shares_of([part.weight for part in data.mixture])
    return sum(float(share) * nats for share, nats in zip(shares, entropies, strict=True))


def data_identity(config: RunConfig) -> dict[str, str]:
    """What a checkpoint remembers of the data, wherever the files lie.

    mixture                shares and fingerprints of the parts, in order; only of a mixture
    documents, tokenizer   fingerprints
    split                  what went where: with these documents it fixes every sample
    """
    data = config.data
    if data.synthetic:
        return dict.fromkeys(("documents", "tokenizer", "split"), "synthetic")
    metas = [part.meta for part in open_parts(data.folders)]
    documents = [meta.documents_sha256 for meta in metas]
    identity = {
        "documents": documents[0],
        "tokenizer": metas[0].tokenizer_sha256,
        "split": "; ".join(map(_split_identity, metas)),
    }
    if not data.mixture:
        return identity
    shares = shares_of([part.weight for part in data.mixture])
    parts = [f"{share} of {text[:16]}" for share, text in zip(shares, documents, strict=True)]
    joined = hashlib.sha256(" ".join(documents).encode()).hexdigest()
    return {"mixture": " + ".join(parts)} | identity | {"documents": joined}


def _split_identity(meta: Meta) -> str:
    tokens = " + ".join(f"{split.tokens} {name}" for name, split in sorted(meta.splits.items()))
    return f"{tokens} tokens, fraction {meta.validation_fraction}, seed {meta.seed}"


def make_loader(
    config: RunConfig, mesh: Mesh, place: Coordinates, consumed_samples: int
) -> GlobalBatchLoader:
    """Training steps of this data rank from a data position on."""
    training = config.training
    return GlobalBatchLoader(
        open_order(config, "train"),
        micro_batch_size=training.micro_batch_size,
        dp_rank=place.dp_rank,
        dp_size=mesh.data,
        batch_size_at=training.global_batch_at,
        consumed_samples=consumed_samples,
        prefetch=config.data.prefetch,
    )
