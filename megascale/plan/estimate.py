"""The seconds of a step by closed form: of one case (`estimate`), or of many layouts at once
(`plan/estimate_many.py`, which the search calls). Both fill the same formula, `closed_form.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megascale.plan.case import Case
from megascale.plan.closed_form import DataPieces, StepPieces, combine
from megascale.plan.prices import ChunkPrices, DataPrices, Spent, StepPrices, total
from megascale.plan.schedules import SCHEDULES
from megascale.plan.work.shape import halves_of
from megascale.units import flops_per_token, mfu


@dataclass(frozen=True)
class Estimate:
    """A step. `parts` (seconds, keys of `closed_form.combine`) add up to `step_s`."""

    step_s: float
    mfu: float
    mfu_causal: float
    tokens_per_s: float
    parts: dict[str, float]


def estimate(case: Case, prices: StepPrices, peak_tflops: float) -> Estimate:
    """The step of `case` at `prices`. `peak_tflops`: of a device, for the utilisation."""
    parts = {name: float(value) for name, value in combine(pieces_of(case, prices)).items()}
    return estimate_of(case, parts, peak_tflops)


def estimate_of(case: Case, parts: dict[str, float], peak_tflops: float) -> Estimate:
    """An estimate from the seconds of its parts."""
    step_s = sum(parts.values())
    job, num_devices = case.job, case.layout.num_devices
    tokens_per_s = job.tokens_per_step / step_s
    full, half = (flops_per_token(job.model, job.seq_len, kind) for kind in ("full", "half"))
    return Estimate(
        step_s=step_s,
        mfu=mfu(tokens_per_s, full, num_devices, peak_tflops),
        mfu_causal=mfu(tokens_per_s, half, num_devices, peak_tflops),
        tokens_per_s=tokens_per_s,
        parts=parts,
    )


def pieces_of(case: Case, prices: StepPrices) -> StepPieces:
    """Every stage, and what a micro-batch passes on the others."""
    layout, software = case.layout, case.software
    p = layout.pipeline
    stages = [range(s, layout.num_chunks, p) for s in range(p)]
    spent = [_stage_spent(prices, chunks) for chunks in stages]
    ways = [[way_s(prices.chunks[chunk]) for chunk in chunks] for chunks in stages]
    weights = [[weight_s(prices.chunks[chunk]) for chunk in chunks] for chunks in stages]
    heads = (0.0, 0.0) if prices.head is None else (way_s(prices.head), weight_s(prices.head))
    whole = halves_of(case) == "whole"
    held = [prices.chunks[chunk] for chunk in stages[0]]
    every = [*ways, *(weights if whole else [])]
    return StepPieces(
        pipeline=p,
        virtual=layout.virtual,
        micro_batches=case.micro_batches,
        busy=np.array([[getattr(s, f.name) for s in spent] for f in fields(Spent)]),
        ways_s=_of_others(ways, heads[0]),
        weights_s=_of_others(weights, heads[1]),
        round_s=sum(map(sum, every)),
        forward_s=held[0].forward.total_s,
        backward_s=held[0].backward.total_s,
        stage_forward_s=sum(chunk.forward.total_s for chunk in held),
        stage_backward_s=sum(chunk.backward.total_s for chunk in held),
        whole=whole,
        zero_bubble=SCHEDULES[layout.schedule].splits_backward,
        joined=layout.join_weight_gradients,
        transfer_s=max(prices.transfer_s),
        transfer_slow_down=prices.transfer_slow_down,
        coupled=software.transfers == "coupled",
        data=data_pieces(prices.data[0]),
        zero_stage=layout.zero_stage,
        overlap_reduce=software.overlap_grad_reduce,
        overlap_gather=software.overlap_param_gather,
        update_s=max(prices.update_s),
        embedding_s=prices.embedding_s,
        load_s=prices.load_s,
        fixed_s=prices.fixed_s,
    )


def _of_others(chunks: list[list[float]], head_s: float) -> npt.NDArray[np.float64]:
    """Of each stage: one chunk of every other one, the first of those in front, the last of those
    behind; and a shared head."""
    p = len(chunks)
    if p == 1:
        return np.zeros(1)
    return (
        np.array(
            [
                sum(chunks[j][0] for j in range(k)) + sum(chunks[j][-1] for j in range(k + 1, p))
                for k in range(p)
            ]
        )
        + head_s
    )


def way_s(chunk: ChunkPrices) -> float:
    """What a micro-batch needs to get past a chunk, and its gradient back."""
    return chunk.forward.total_s + chunk.recompute.total_s + chunk.backward_input.total_s


def weight_s(chunk: ChunkPrices) -> float:
    """Of the weights' half."""
    return chunk.backward_weight.total_s


def _stage_spent(prices: StepPrices, chunks: range) -> Spent:
    held = [prices.chunks[chunk] for chunk in chunks]
    if prices.head is not None:
        held.append(prices.head)
    return total(chunk.forward + chunk.backward for chunk in held)


def data_pieces(data: DataPrices) -> DataPieces:
    """Of the buckets of a stage. Nothing where there is no data parallelism."""
    if not data.reduce_s:
        return DataPieces(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    first = min(data.reduce_s)
    gathers = data.gather_s.get(first, ())
    return DataPieces(
        first_gather_s=gathers[0] if gathers else 0.0,
        chunk_gather_s=sum(gathers),
        stage_gather_s=sum(map(sum, data.gather_s.values())),
        first_reduce_s=data.reduce_s[first][-1],
        chunk_reduce_s=sum(data.reduce_s[first]),
        stage_reduce_s=sum(map(sum, data.reduce_s.values())),
        buckets=len(data.reduce_s[first]),
        slow_down=data.slow_down,
    )
