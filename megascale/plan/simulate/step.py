"""Simulates one step of a case (MegaScale 2, 3.2): builds its action lists, prices and runs them.

All data- and tensor-parallel ranks of a stage are alike, so one of each stage is walked.
"""

from __future__ import annotations

from collections.abc import Sequence

from megascale.plan.actions import Schedule
from megascale.plan.case import Case
from megascale.plan.prices import DataPrices, Spent, StepPrices, total
from megascale.plan.schedules import build_schedule
from megascale.plan.schedules.transfers import SEND_WINDOW
from megascale.plan.simulate.buckets import Buckets
from megascale.plan.simulate.engine import Engine
from megascale.plan.simulate.lowering import Costs, Lowering, PricedCosts
from megascale.plan.simulate.program import Program, StageProgram, TransferTable, loss_of
from megascale.plan.simulate.timeline import Timeline, timeline_of


def simulate(case: Case, prices: StepPrices, *, forward_only: bool = False) -> Timeline:
    """The step of `case`; `forward_only`: its forward passes alone, without an update."""
    schedule = _schedule(case, forward_only)
    table = TransferTable()
    stages = [
        _stage(case, prices, schedule, table, stage) for stage in range(schedule.shape.stages)
    ]
    program = Program(stages, table, loss_of(prices.transfer_slow_down))
    engine = Engine(program)
    engine.run()
    spent = [_spent(prices, schedule, stage) for stage in range(schedule.shape.stages)]
    return timeline_of(program, engine, spent, 0.0 if forward_only else prices.embedding_s)


def step_time(
    schedule: Schedule,
    costs: Costs,
    transfer_s: float = 0.0,
    *,
    send_window: int = SEND_WINDOW,
) -> float:
    """Seconds of the computes and transfers of a schedule, without what surrounds them.

    send_window  most sends of a channel in flight; the runtime's own unless said otherwise
    """
    shape, table, stages = schedule.shape, TransferTable(), []
    for stage, actions in enumerate(schedule.actions):
        program = StageProgram(stage)
        buckets = Buckets(program, DataPrices({}, {}, {}), shape.chunks_of(stage), zero_stage=1)
        prices = [transfer_s] * shape.num_chunks
        lowering = _lower(schedule, program, table, buckets, costs, prices)
        lowering.send_window = send_window
        lowering.run(actions)
        stages.append(program)
    engine = Engine(Program(stages, table))
    engine.run()
    return max(engine.end_s)


def _schedule(case: Case, forward_only: bool) -> Schedule:
    layout = case.layout
    return build_schedule(
        "forward_only" if forward_only else layout.schedule,
        stages=layout.pipeline,
        chunks_per_stage=layout.virtual,
        micro_batches=case.micro_batches,
        transfers=case.software.transfers,
        shared_head=layout.share_head,
        split_backward=layout.join_weight_gradients > 1,
    )


def _stage(
    case: Case, prices: StepPrices, schedule: Schedule, table: TransferTable, stage: int
) -> StageProgram:
    """The program of a stage: update, loading, the actions, late reductions."""
    shape, data = schedule.shape, prices.data[stage]
    program = StageProgram(stage, data_loss=loss_of(data.slow_down))
    head = [shape.head_chunk] if schedule.shared_head else []
    buckets = Buckets(
        program,
        data,
        [*shape.chunks_of(stage), *head],
        zero_stage=case.layout.zero_stage,
        overlaps_reduce=case.software.overlap_grad_reduce,
        overlaps_gather=case.software.overlap_param_gather,
    )
    if not schedule.forward_only:
        buckets.update(prices.update_s[stage])
    buckets.expect(schedule.actions[stage])
    program.pause("load", prices.load_s)
    program.pause("fixed", prices.fixed_s)
    costs = PricedCosts(prices, case.layout, shape.micro_batches, shape.head_chunk)
    lowering = _lower(schedule, program, table, buckets, costs, prices.transfer_s)
    lowering.run(schedule.actions[stage])
    buckets.finish()
    return program


def _lower(
    schedule: Schedule,
    program: StageProgram,
    table: TransferTable,
    buckets: Buckets,
    costs: Costs,
    transfer_s: Sequence[float],
) -> Lowering:
    return Lowering(
        schedule.shape,
        program,
        table,
        costs=costs,
        transfer_s=transfer_s,
        buckets=buckets,
        shared_head_s=max(transfer_s),
        forward_only=schedule.forward_only,
    )


def _spent(prices: StepPrices, schedule: Schedule, stage: int) -> Spent:
    """What the computes of a stage take alone."""
    held = [prices.chunks[chunk] for chunk in schedule.shape.chunks_of(stage)]
    if schedule.shared_head:
        assert prices.head is not None, "a shared head without its price"
        held.append(prices.head)
    forward = total(chunk.forward for chunk in held)
    backward = Spent() if schedule.forward_only else total(chunk.backward for chunk in held)
    return (forward + backward).times(schedule.shape.micro_batches)
