"""The predicted state of a rank is what a rank allocates: parameters, gradients, optimizer, and
what gradients that travel in bf16 need on their way.

Measured: every tensor that is alive after a training step. It exceeds the prediction by padding
(of which the buckets know) and by small change (batch, positions, norms), never by a copy of
anything that grows with the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megascale.config import load_config
from megascale.plan.memory import predict_memory, stage_chunks
from megascale.train.assemble import assemble
from megascale.train.step import train_step
from tests.distributed import run_ranks
from tests.parallel.live import forget_live_tensors, live_bytes
from tests.train.harness import TINY, make_loader, read

SMALL_CHANGE_BYTES = 8_000
MOST_PADDING = 0.01  # of the elements
MODEL = ["model.hidden_size=64", "model.ffn_hidden_size=192", "model.num_layers=4"]
TP, PP, VP = (
    f"parallelism.{name}_size=2"
    for name in ("tensor_parallel", "pipeline_parallel", "virtual_pipeline")
)
ZERO_2 = ["parallelism.zero_stage=2", "parallelism.bucket_mb=0.25"]  # a layer or two a bucket
BF16 = "training.dtype=bfloat16"
GPT = ["model.norm=layernorm", "model.activation=gelu", "model.bias=all"]
LAYOUTS = {
    "dp4 bf16": [BF16],
    "dp4 zero2": ZERO_2,
    "tp2 dp2, padded vocabulary": [TP, "model.vocab_size=1003"],
    "tp2 dp2 zero2 bf16": [TP, *ZERO_2, BF16],
    "pp2 dp2, tied embeddings": [PP, "model.tie_embeddings=true"],
    "tp2 pp2 vp2 gpt bf16": [TP, PP, VP, *GPT, BF16],
}


@dataclass
class Measured:
    """Bytes of one rank, and elements: as the model counts them, and as stored with padding."""

    allocated: int
    predicted: int  # without the buckets in flight
    predicted_in_flight: int
    largest_bucket: int
    elements: int
    stored_elements: int


def _measure(rank: int, world_size: int) -> dict[str, Measured]:
    return {name: _measure_layout(world_size, changes) for name, changes in LAYOUTS.items()}


def _measure_layout(world_size: int, changes: list[str]) -> Measured:
    config = load_config(None, [*TINY, *MODEL, *changes])
    mesh = config.mesh(world_size)
    forget_live_tensors()
    assembly = assemble(config, mesh, torch.device("cpu"))
    place, zero = assembly.groups.coordinates, assembly.zero
    batch = read(config, make_loader(config, place.dp_rank, mesh.data), 0, ragged=False)
    train_step(assembly, batch.micro_batches, global_batch=batch.num_samples, lr=0.01)
    zero.wait_for_parameters()
    assembly.program.batches = []
    allocated = live_bytes()

    memory = predict_memory(config, mesh, place.pp_rank)
    chunks = stage_chunks(config, place.pp_rank)
    elements = sum(p.local_elements(mesh.tensor) for chunk in chunks for p in chunk)
    main_bytes = zero.buckets[0].gradient.element_size()
    in_flight = 0
    if config.parallelism.zero_stage == 2:
        in_flight = memory.main_gradient_bytes - main_bytes * elements // mesh.data
    state = memory.parameter_bytes + memory.main_gradient_bytes + memory.optimizer_bytes
    return Measured(
        allocated=allocated,
        predicted=state - in_flight,
        predicted_in_flight=in_flight,
        largest_bucket=main_bytes * max(bucket.num_elements for bucket in zero.buckets),
        elements=elements,
        stored_elements=sum(bucket.num_elements for bucket in zero.buckets),
    )


@pytest.mark.full
def test_a_rank_allocates_what_is_predicted() -> None:
    for found in run_ranks(_measure, 4):
        for name, memory in found.items():
            padding = memory.stored_elements / memory.elements
            assert 1.0 <= padding <= 1.0 + MOST_PADDING, (name, memory)
            in_flight = 2 * memory.largest_bucket if memory.predicted_in_flight else 0
            assert memory.predicted_in_flight * (1 + MOST_PADDING) >= in_flight, (name, memory)
            small_change = memory.allocated - in_flight - memory.predicted * padding
            assert 0 <= small_change <= SMALL_CHANGE_BYTES, (name, memory)


IN_BF16 = "parallelism.grad_reduce_dtype=bfloat16"
TRAVELS = {
    "one bucket": [IN_BF16],
    "zero2, small buckets": [IN_BF16, *ZERO_2, BF16],
}


def _measure_reductions(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """(the most that starting a bucket's reduction allocates, predicted), by layout."""
    found = {}
    for name, changes in TRAVELS.items():
        config = load_config(None, [*TINY, *MODEL, *changes])
        mesh = config.mesh(world_size)
        zero = assemble(config, mesh, torch.device("cpu")).zero
        assert zero.groups.data is not None
        taken = []
        for bucket in zero.buckets:
            full = torch.zeros(bucket.num_elements, dtype=bucket.gradient.dtype)
            forget_live_tensors()
            pending = zero._gradients.reduction.start(bucket, full, zero.groups.data)
            taken.append(live_bytes() - full.nbytes)  # the result will be a view of it
            pending.wait()
        found[name] = max(taken), predict_memory(config, mesh, 0).reduction_bytes
    return found


@pytest.mark.full
def test_gradients_that_travel_in_bf16_take_what_is_predicted() -> None:
    for found in run_ranks(_measure_reductions, 4):
        for name, (taken, predicted) in found.items():
            least = predicted if name == "one bucket" else predicted / 2  # those are never full
            assert 0 < least <= taken <= predicted * (1 + MOST_PADDING), (name, found)
