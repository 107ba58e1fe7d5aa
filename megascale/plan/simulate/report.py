"""A simulated step for a person, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megascale.plan.case import Case
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.usable import usable_bytes
from megascale.plan.memory import case_memory
from megascale.plan.report.table import table
from megascale.plan.search.explain import describe_layout, describe_switches
from megascale.plan.simulate.drawing import LEGEND, draw
from megascale.plan.simulate.timeline import StageParts, Timeline
from megascale.plan.validate.rows import Row
from megascale.units import flops_per_token, format_bytes, format_count, mfu

_NAMES = {
    "gemm_s": "GEMM",
    "attention_s": "attention",
    "memory_s": "memory",
    "tensor_s": "TP",
    "launch_s": "launch",
    "slowed_s": "slowed",
    "transfer_s": "PP",
    "bubble_s": "bubble",
    "data_s": "DP",
    "embedding_s": "tied",
    "update_s": "update",
    "load_s": "load",
    "fixed_s": "fixed",
}
_MEANING = (
    "(GEMM to launch: of the model's computes; TP, PP, DP: communication that nothing hides;",
    "slowed: what computes lose beside communication; bubble: waiting for stages to compute)",
)


@dataclass(frozen=True)
class Simulated:
    """A timeline and what it is of."""

    case: Case
    cluster: Cluster
    timeline: Timeline

    @cached_property
    def stage_bytes(self) -> tuple[int, ...]:
        """Predicted memory of a rank, by stage."""
        stages = range(self.case.layout.pipeline)
        return tuple(case_memory(self.case, stage).total_bytes for stage in stages)

    @property
    def fits(self) -> bool:
        return max(self.stage_bytes) <= usable_bytes(self.cluster.device)

    @property
    def tokens_per_s(self) -> float:
        return self.case.job.tokens_per_step / self.timeline.step_s

    def mfu(self, causal: bool = False) -> float:
        job = self.case.job
        flops = flops_per_token(job.model, job.seq_len, "half" if causal else "full")
        peak = self.cluster.device.peak_tflops
        return mfu(self.tokens_per_s, flops, self.case.layout.num_devices, peak)


def as_text(simulated: Simulated) -> str:
    timeline = simulated.timeline
    lines = [
        *_answer(simulated),
        "",
        "% of the step, by stage:",
        *_stage_table(timeline),
        *_MEANING,
        "",
        *draw(timeline),
        *LEGEND,
    ]
    return "\n".join(lines)


def _answer(simulated: Simulated) -> Iterator[str]:
    case, timeline, cluster = simulated.case, simulated.timeline, simulated.cluster
    layout = case.layout
    yield (
        f"step {timeline.step_s:.3f} s   MFU {simulated.mfu():.1%} (causal "
        f"{simulated.mfu(causal=True):.1%})   {format_count(simulated.tokens_per_s)} tokens/s   "
        f"bubble {timeline.bubble_share:.2%}"
    )
    yield f"  {describe_layout(layout)}, {case.micro_batches} micro-batches"
    yield f"  {describe_switches(layout)}, {case.software.transfers} transfers"
    yield (
        f"  simulated for {layout.num_devices} x {cluster.device.name}, cluster {cluster.name!r}; "
        "not measured"
    )
    most = max(simulated.stage_bytes)
    held = f"{format_bytes(most)} on stage {simulated.stage_bytes.index(most)}"
    limit = format_bytes(usable_bytes(cluster.device))
    if simulated.fits:
        yield f"  memory {held}, {limit} may be used"
    else:
        yield (
            f"  DOES NOT FIT: needs {held}, {limit} may be used; `megascale plan` finds "
            "layouts that fit"
        )
    yield "  without slow nodes, late launches and fixed costs, which `megascale plan` counts"


def _stage_table(timeline: Timeline) -> Iterator[str]:
    """Columns that are 0 everywhere are left out; stages that are alike are one line."""
    shown = [name for name in _NAMES if any(getattr(p, name) != 0.0 for p in timeline.parts)]
    rows = [["stage", *(_NAMES[name] for name in shown)]]
    first = 0
    for stage, parts in enumerate(timeline.parts):
        cells = _shares(parts, timeline.step_s, shown)
        following = timeline.parts[stage + 1 : stage + 2]
        if following and _shares(following[0], timeline.step_s, shown) == cells:
            continue
        rows.append([str(stage) if first == stage else f"{first}-{stage}", *cells])
        first = stage + 1
    mean = timeline.mean_parts
    rows.append(["mean", *(f"{mean[name] / timeline.step_s:.2%}"[:-1] for name in shown)])
    yield from (f"  {line}" for line in table(rows))


def _shares(parts: StageParts, step_s: float, shown: list[str]) -> list[str]:
    return [f"{getattr(parts, name) / step_s:.2%}"[:-1] for name in shown]


def as_document(simulated: Simulated) -> dict[str, Any]:
    """The same as a JSON object."""
    case, timeline = simulated.case, simulated.timeline
    job = asdict(case.job)
    job["model"] = case.job.model.model_dump()
    return {
        "simulated": True,
        "cluster": simulated.cluster.name,
        "device": simulated.cluster.device.name,
        "num_devices": case.layout.num_devices,
        "job": job,
        "layout": asdict(case.layout),
        "software": asdict(case.software),
        "micro_batches": case.micro_batches,
        "step_s": timeline.step_s,
        "mfu": simulated.mfu(),
        "mfu_causal": simulated.mfu(causal=True),
        "tokens_per_s": simulated.tokens_per_s,
        "bubble_share": timeline.bubble_share,
        "stage_bytes": simulated.stage_bytes,
        "limit_bytes": usable_bytes(simulated.cluster.device),
        "fits": simulated.fits,
        "effects_of_scale": False,
        "mean_parts": timeline.mean_parts,
        "stages": [
            {"stage": stage, "chunks": timeline.chunks_of(stage), **asdict(parts)}
            for stage, parts in enumerate(timeline.parts)
        ],
    }


@dataclass(frozen=True)
class Replayed:
    """A row of the paper, simulated."""

    row: Row
    timeline: Timeline

    @property
    def error(self) -> float:
        """Of the step's seconds: predicted / measured - 1."""
        return self.timeline.step_s / self.row.measured_s - 1.0

    def as_document(self) -> dict[str, Any]:
        row = self.row
        return {
            "set": row.set,
            "system": row.system,
            "label": row.label,
            "gpus": row.gpus,
            "fitted": row.fitted,
            "simulated_s": self.timeline.step_s,
            "measured_s": row.measured_s,
            "error": self.error,
            "mfu": row.mfu_of(self.timeline.step_s),
            "measured_mfu": row.mfu_of(row.measured_s),
            "mean_parts": self.timeline.mean_parts,
        }


def replay_text(name: str, replayed: list[Replayed]) -> str:
    """What the paper prints beside what is simulated."""
    titles = ["system", "case", "GPUs", "printed s", "simulated s", "error", "printed MFU", "MFU"]
    rows = [[*titles, "bubble", ""]]
    for one in replayed:
        row, step_s = one.row, one.timeline.step_s
        rows.append(
            [
                row.system,
                row.label,
                str(row.gpus),
                f"{row.measured_s:.2f}",
                f"{step_s:.2f}",
                f"{one.error:+.1%}",
                f"{row.mfu_of(row.measured_s):.1%}",
                f"{row.mfu_of(step_s):.1%}",
                f"{one.timeline.bubble_share:.1%}",
                "fitted" if row.fitted else "",
            ]
        )
    errors = [abs(one.error) for one in replayed]
    first = replayed[0].row
    title = f"{name}, simulated on cluster {first.cluster.name!r}; printed: {first.source}"
    said = (
        f"error of the step time: mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}; "
        "fitted: a number was chosen with this row in view"
    )
    return "\n".join([title, *table(rows, left=(0, 1, 9)), said])
