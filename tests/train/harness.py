"""Train a tiny model in any layout on gloo ranks and bring everything back as numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megascale.config import RunConfig, load_config
from megascale.data import GlobalBatch, GlobalBatchLoader, MicroBatch
from megascale.data.opening import open_order
from megascale.train.assemble import Assembly, assemble
from megascale.train.state import run_pieces
from megascale.train.step import train_step
from tests.distributed import run_ranks

TINY = [
    "model.hidden_size=32",
    "model.num_layers=8",
    "model.num_heads=4",
    "model.ffn_hidden_size=64",
    "model.vocab_size=256",
    "training.seq_len=16",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "data.synthetic=true",
    "optimizer.lr=0.01",
]

# name, global shape, offset, values: what one rank holds of a logical tensor
RankPiece = tuple[str, tuple[int, ...], tuple[int, ...], NDArray[Any]]


@dataclass
class Outcome:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    gradients: list[RankPiece]
    parameter_hashes: list[list[bytes]]  # per step, of the model-parallel shard
    tied_hashes: list[bytes]  # per step, of an embedding that two stages hold
    coordinates: tuple[int, int, int]  # tp, dp, pp


def read(config: RunConfig, loader: GlobalBatchLoader, step: int, *, ragged: bool) -> GlobalBatch:
    """The share of step `step`; `ragged` masks out a different number of tokens a sample."""
    size = config.training.global_batch_size
    batch = loader.read(step * size, size)
    if not ragged:
        return batch
    return GlobalBatch(
        batch.first_sample,
        batch.num_samples,
        tuple(_masked(micro_batch) for micro_batch in batch.micro_batches),
    )


def _masked(batch: MicroBatch) -> MicroBatch:
    mask = batch.loss_mask_BS.copy()
    for row, sample in enumerate(batch.sample_numbers_B):
        mask[row, : int(sample) % (mask.shape[1] - 1)] = False
    return replace(batch, loss_mask_BS=mask)


def make_loader(config: RunConfig, dp_rank: int, dp_size: int) -> GlobalBatchLoader:
    training = config.training
    return GlobalBatchLoader(
        open_order(config, "train"),
        micro_batch_size=training.micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        batch_size_at=training.global_batch_at,
        prefetch=0,
    )


def train_tiny(
    rank: int, world_size: int, overrides: list[str], num_steps: int, ragged: bool
) -> Outcome:
    """Runs on every rank."""
    config = load_config(None, [*TINY, *overrides])
    mesh = config.mesh(world_size)
    device = torch.device("cuda", rank) if config.training.device == "cuda" else torch.device("cpu")
    assembly = assemble(config, mesh, device)
    place = assembly.groups.coordinates
    loader = make_loader(config, place.dp_rank, mesh.data)
    gradients: list[RankPiece] = []
    step_update = assembly.optimizer.step

    def capture(lr: float, grad_scale: Any = 1.0, **options: Any) -> Any:
        if not gradients:
            gradients.extend(_gradients(assembly, grad_scale))
        return step_update(lr, grad_scale, **options)

    assembly.optimizer.step = capture  # type: ignore[method-assign,assignment]
    losses, norms, hashes, tied_hashes = [], [], [], []
    for step in range(num_steps):
        batch = read(config, loader, step, ragged=ragged)
        outcome = train_step(
            assembly,
            batch.micro_batches,
            global_batch=batch.num_samples,
            lr=config.optimizer.lr,
        )
        loss, norm, *_ = outcome.summary.read()
        losses.append(loss)
        norms.append(norm)
        assembly.zero.wait_for_parameters()
        tied_hashes += [_digest(b.parameters) for b in assembly.zero.buckets if b.tied]
        hashes.append([_digest(bucket.parameters) for bucket in assembly.zero.buckets])
    coordinates = (place.tp_rank, place.dp_rank, place.pp_rank)
    return Outcome(losses, norms, gradients, hashes, tied_hashes, coordinates)


def _digest(values: torch.Tensor) -> bytes:
    return hashlib.sha256(values.cpu().view(torch.uint8).numpy().tobytes()).digest()


def _gradients(assembly: Assembly, grad_scale: Any) -> list[RankPiece]:
    scale = float(grad_scale)
    return [
        (
            piece.key.removeprefix("gradient/"),
            piece.global_shape,
            piece.box.offset,
            (piece.tensor * scale).cpu().numpy().copy(),
        )
        for run in assembly.zero.runs
        for piece in run_pieces(
            run, "gradient", run.bucket.gradient[run.start : run.stop], "counted"
        )
    ]


def join(outcomes: list[Outcome]) -> dict[str, NDArray[Any]]:
    """Whole logical gradients; refuses gaps and overlaps."""
    whole: dict[str, NDArray[Any]] = {}
    counts: dict[str, int] = {}
    for outcome in outcomes:
        for name, shape, offset, values in outcome.gradients:
            target = whole.setdefault(name, np.full(shape, np.nan))
            place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert np.isnan(target[place]).all(), f"{name}: two ranks hold {offset}"
            target[place] = values
            counts[name] = counts.get(name, 0) + values.size
    for name, target in whole.items():
        assert counts[name] == prod(target.shape), f"{name}: {counts[name]} of {target.shape}"
    return whole


def run_layout(
    layout: dict[str, int], overrides: list[str], num_steps: int, *, ragged: bool = False
) -> list[Outcome]:
    """Train in `layout` (tp, dp, pp, vp, zero) and return every rank's outcome."""
    world_size = layout["tp"] * layout["dp"] * layout["pp"]
    settings = [
        f"parallelism.tensor_parallel_size={layout['tp']}",
        f"parallelism.pipeline_parallel_size={layout['pp']}",
        f"parallelism.virtual_pipeline_size={layout['vp']}",
        f"parallelism.zero_stage={layout['zero']}",
        "parallelism.bucket_mb=0.05",
    ]
    return run_ranks(
        train_tiny,
        world_size,
        [*overrides, *settings],
        num_steps,
        ragged,
        timeout_s=110,
        cuda="training.device=cuda" in overrides,
    )
