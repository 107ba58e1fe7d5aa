"""Which parameters travel together over data ranks: the rule of `parallel/buckets.py`, on sizes.

Units (embedding, layers, head) of a chunk are joined up to `bucket_mb` of fp32 gradients, at least
one unit a bucket; a chunk's first bucket is an eighth of that, as nothing hides it; a tied
embedding is a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megascale.config import ModelConfig
from megascale.plan.case import Case
from megascale.plan.parameters import chunk_parameters
from megascale.plan.work.ends import vocabulary_rows

FIRST_BUCKET_SHARE = 1 / 8  # `parallel/buckets.py`
_MAIN_BYTES = 4


@dataclass(frozen=True)
class BucketSize:
    """`elements` of a tensor rank; `layers` that lie in it."""

    elements: int
    layers: int


@dataclass(frozen=True)
class Unit:
    elements: int
    is_layer: bool
    alone: bool = False


def stage_buckets(case: Case, stage: int) -> dict[int, tuple[BucketSize, ...]]:
    """The buckets of each chunk of a stage, in the order of forward."""
    limit = case.software.bucket_mb * 1e6 / max(_MAIN_BYTES, case.job.dtype_bytes)
    last = case.layout.num_chunks - 1
    larger = case.job.model.num_layers % case.layout.num_chunks
    alike: dict[tuple[bool, bool, bool], tuple[BucketSize, ...]] = {}
    found = {}
    for chunk in held_chunks(case, stage):
        kind = chunk == 0, chunk >= last, chunk < larger
        if chunk > last or kind not in alike:
            alike[kind] = join_units(chunk_units(case, chunk), limit)
        found[chunk] = alike[kind]
    return found


def held_chunks(case: Case, stage: int) -> list[int]:
    """A stage's chunks; a shared head is one more."""
    layout = case.layout
    chunks = list(range(stage, layout.num_chunks, layout.pipeline))
    return [*chunks, layout.num_chunks] if layout.share_head else chunks


def chunk_units(case: Case, chunk: int) -> tuple[Unit, ...]:
    """Of a chunk, in the order of forward; chunk `num_chunks` is a shared head's part."""
    job, layout = case.job, case.layout
    model = job.model
    parts = layout.tensor * (layout.pipeline if layout.share_head else 1)
    table = vocabulary_rows(model.vocab, layout.tensor) * model.hidden_size
    head = vocabulary_rows(model.vocab, parts) * model.hidden_size
    if chunk == layout.num_chunks:
        return (Unit(head, False),)
    base, larger = divmod(model.num_layers, layout.num_chunks)  # `stages.split_layers`
    layers = [Unit(layer_elements(model, layout.tensor), True)] * (base + (chunk < larger))
    tied_apart = model.tie_embeddings and layout.pipeline > 1
    units: list[Unit] = []
    if chunk == 0:
        rows = (model.max_seq_len or job.seq_len) if model.position == "learned" else 0
        units += _end(table, rows * model.hidden_size, alone=tied_apart)
    units += layers
    if chunk == layout.num_chunks - 1:
        norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
        own = not layout.share_head and (tied_apart or not model.tie_embeddings)
        units += _end(head if own else 0, norm, alone=tied_apart)
    return tuple(units)


def _end(table: int, rest: int, *, alone: bool) -> list[Unit]:
    """A unit of a table and what goes with it; a tied table is by itself."""
    parts = (
        [Unit(table, False, alone=True), Unit(rest, False)]
        if alone
        else [Unit(table + rest, False)]
    )
    return [part for part in parts if part.elements]


@lru_cache(maxsize=4096)
def layer_elements(model: ModelConfig, tensor: int) -> int:
    """Parameters of a layer on a tensor rank."""
    parameters = chunk_parameters(model, range(1), embed=False, head=False, num_positions=0)
    return sum(parameter.local_elements(tensor) for parameter in parameters)


@lru_cache(maxsize=4096)
def join_units(units: Sequence[Unit], limit: float) -> tuple[BucketSize, ...]:
    """Consecutive units up to `limit` elements, in the order of the first unit of each."""
    found = [(place, BucketSize(u.elements, 0)) for place, u in enumerate(units) if u.alone]
    first = size = layers = 0
    most = FIRST_BUCKET_SHARE * limit
    for place, unit in enumerate(units):
        if unit.alone:
            continue
        if size and size + unit.elements > most:
            found.append((first, BucketSize(size, layers)))
            size, layers, most = 0, 0, limit
        first = place if size == 0 else first
        size, layers = size + unit.elements, layers + unit.is_layer
    if size:
        found.append((first, BucketSize(size, layers)))
    return tuple(bucket for _, bucket in sorted(found, key=lambda entry: entry[0]))
