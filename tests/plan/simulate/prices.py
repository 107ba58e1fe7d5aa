"""Prices by hand: round numbers, so that timelines can be computed on paper."""

from __future__ import annotations

from dataclasses import replace

from megascale.config import ModelConfig
from megascale.plan.actions import Action, ActionKind
from megascale.plan.case import Case, Job, Layout, Software
from megascale.plan.prices import ChunkPrices, DataPrices, Spent, StepPrices
from megascale.plan.simulate.lowering import Costs

NO_DATA = DataPrices({}, {}, {})


def by_kind(forward: float, backward_input: float, backward_weight: float) -> Costs:
    """Costs of a chunk's work, the same for all chunks; a whole backward is both halves."""
    costs = {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD: backward_input + backward_weight,
        ActionKind.BACKWARD_INPUT: backward_input,
        ActionKind.BACKWARD_WEIGHT: backward_weight,
    }

    def cost(action: Action) -> float:
        return costs[action.kind]

    return cost


def case_of(
    micro_batches: int,
    *,
    software: Software | None = None,
    **layout: object,
) -> Case:
    """A case whose pipeline runs as many micro-batches; layout: fields of `Layout`."""
    spread = replace(Layout(), **layout)  # type: ignore[arg-type]
    batch = micro_batches * spread.data * spread.micro_batch_size
    return Case(Job(ModelConfig(vocab_size=512), batch, 128), spread, software or Software())


def chunk_prices(forward: float, backward_input: float, backward_weight: float) -> ChunkPrices:
    return ChunkPrices(
        Spent(gemm_s=forward), Spent(), Spent(gemm_s=backward_input), Spent(gemm_s=backward_weight)
    )


def prices_of(
    case: Case,
    chunk: ChunkPrices | None = None,
    *,
    transfer_s: float = 0.0,
    transfer_slow_down: float = 1.0,
    reduce_s: tuple[float, ...] = (),
    gather_s: tuple[float, ...] = (),
    layers: tuple[float, ...] | None = None,
    slow_down: float = 1.0,
    update_s: float = 0.0,
) -> StepPrices:
    """All chunks alike, with the same buckets; a chunk's price is (1, 1, 1) by default."""
    layout = case.layout
    chunk = chunk or chunk_prices(1.0, 1.0, 1.0)

    def of(stage: int, values: tuple[float, ...]) -> dict[int, tuple[float, ...]]:
        held = range(stage, layout.num_chunks, layout.pipeline)
        return dict.fromkeys(held, values) if values else {}

    data = tuple(
        DataPrices(
            of(stage, reduce_s),
            of(stage, gather_s),
            of(stage, layers or (1.0,) * max(len(reduce_s), len(gather_s))),
            slow_down,
        )
        for stage in range(layout.pipeline)
    )
    return StepPrices(
        chunks=(chunk,) * layout.num_chunks,
        head=None,
        transfer_s=(transfer_s,) * layout.num_chunks,
        transfer_slow_down=transfer_slow_down,
        data=data,
        update_s=(update_s,) * layout.pipeline,
        load_s=0.0,
        fixed_s=0.0,
        embedding_s=0.0,
    )
