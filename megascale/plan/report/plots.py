"""The plots of a plan as data: traces and layouts in plotly's own terms, no plotly needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megascale.plan.report.text import confidence_line
from megascale.plan.search.explain import describe_layout, describe_switches
from megascale.plan.search.parts import WORDS
from megascale.plan.search.result import Plan, Ranked, Training

_GIB = 2.0**30


@dataclass(frozen=True)
class Figure:
    """One plot; `name` is its place in the page."""

    name: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def figures(plan: Plan) -> list[Figure]:
    """In the order of the page."""
    found = [_parts(plan), _memory(plan), *_sweeps(plan)]
    if plan.training is not None:
        found.append(_training(plan.training))
    return found


def _parts(plan: Plan) -> Figure:
    """Where the seconds of each layout's step go."""
    shown = _shown(plan)
    labels = [_label(one) for one in shown]
    names = dict.fromkeys(name for one in shown for name, s in one.parts.items() if s > 0)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": WORDS.get(name, name),
            "x": [one.parts.get(name, 0.0) for one in shown],
            "y": labels,
            "hovertext": [describe_switches(one.layout) for one in shown],
        }
        for name in names
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "seconds a step"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "margin": {"t": 20},
    }
    sure = confidence_line(plan)
    caption = f"Step time by what it goes to. {sure[0].upper()}{sure[1:]}."
    return Figure("parts", "Layouts", caption, traces, layout)


def _memory(plan: Plan) -> Figure:
    """Of each stage of the first layouts, under the limit."""
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": _label(one),
            "x": list(range(len(one.stage_bytes))),
            "y": [num_bytes / _GIB for num_bytes in one.stage_bytes],
        }
        for one in _shown(plan)
    ]
    last = max(len(one.stage_bytes) for one in _shown(plan)) - 1
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "limit",
            "x": [0, max(last, 1)],
            "y": [plan.limit_bytes / _GIB] * 2,
            "line": {"dash": "dash", "color": "#d1242f"},
        }
    )
    layout = {
        "xaxis": {"title": {"text": "pipeline stage"}, "dtick": max(1, last // 16)},
        "yaxis": {"title": {"text": "GiB a GPU"}, "rangemode": "tozero"},
        "margin": {"t": 20},
    }
    caption = "Predicted peak of a rank, by stage; above the limit nothing is proposed."
    return Figure("memory", "Memory", caption, traces, layout)


def _sweeps(plan: Plan) -> list[Figure]:
    """The best step for each value of a degree, where there are several values."""
    return [
        Figure(
            name=f"sweep-{sweep.name.replace(' ', '-')}",
            title=f"Step time against {sweep.name}",
            caption="The best layout with that value, everything else free; by the closed form.",
            traces=[
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": [str(value) for value in sweep.values],
                    "y": list(sweep.step_s),
                    "name": sweep.name,
                }
            ],
            layout={
                "xaxis": {"title": {"text": sweep.name}, "type": "category"},
                "yaxis": {"title": {"text": "seconds a step"}, "rangemode": "tozero"},
                "margin": {"t": 20},
            },
        )
        for sweep in plan.sweeps
        if len(sweep.values) > 1
    ]


def _training(training: Training) -> Figure:
    """Days, or money where a price is known, without faults and at three published rates."""
    raw, unit = training.days, "days"
    if training.cost is not None:
        raw, unit = training.cost, "cost"
    shares = {name: share for name, share in training.ettr_of.items() if share > 0}
    names = ["without faults", *(f"{name}: ETTR {share:.3f}" for name, share in shares.items())]
    trace = {
        "type": "bar",
        "x": names,
        "y": [raw, *(raw / share for share in shares.values())],
        "name": unit,
    }
    layout = {"yaxis": {"title": {"text": unit}}, "xaxis": {}, "margin": {"t": 20}}
    caption = f"Of {training.tokens:.3g} tokens; {'; '.join(training.assumptions)}."
    return Figure("training", "Training", caption, [trace], layout)


def _shown(plan: Plan) -> list[Ranked]:
    given = plan.given
    if given is None or any(one.layout == given.layout for one in plan.ranked):
        return list(plan.ranked)
    return [*plan.ranked, given]


def _label(one: Ranked) -> str:
    return f"{one.place}. {describe_layout(one.layout)}"
