"""Why one layout is faster than another: the difference of their steps, part by part.

Parts are seconds of the same step and sum to it, so that the differences sum to what the slower one
loses. Nothing is explained by a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Mapping

from megascale.plan.case import Layout
from megascale.plan.search.parts import WORDS
from megascale.plan.search.result import Ranked
from megascale.units import format_bytes

_SMALL = 0.1  # of the largest difference: parts below it are told together


def difference(best: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Seconds that `other` spends more than `best`, by part, the largest first; less: negative."""
    names = dict.fromkeys([*best, *other])
    more = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in names}
    return dict(sorted(more.items(), key=lambda item: -abs(item[1])))


def why_slower(best: Ranked, other: Ranked) -> tuple[str, ...]:
    """Lines that say why `other` is not first."""
    lost_s = other.step_s - best.step_s
    share = lost_s / best.step_s
    head = f"{describe_layout(other.layout)}: {lost_s:+.3f} s a step ({share:+.1%})"
    lines = [head, _told(difference(best.parts, other.parts))]
    changed = _changed(best.layout, other.layout)
    if changed:
        lines.append(f"it differs in {', '.join(changed)}")
    bytes_more = other.most_bytes - best.most_bytes
    words = "more" if bytes_more >= 0 else "less"
    lines.append(f"and holds {format_bytes(abs(bytes_more))} {words} on its fullest stage")
    return tuple(lines)


def _told(more: Mapping[str, float]) -> str:
    """The parts that matter, the largest first, and the sum of the others."""
    least = _SMALL * max(map(abs, more.values()), default=0.0)
    told = {name: seconds for name, seconds in more.items() if abs(seconds) > least}
    rest = sum(more.values()) - sum(told.values())
    words = [f"{WORDS.get(name, name)} {seconds:+.3f} s" for name, seconds in told.items()]
    if len(told) < len(more) and abs(rest) >= 5e-4:
        words.append(f"the rest {rest:+.3f} s")
    return ", ".join(words) if words else "no part differs"


def describe_layout(layout: Layout) -> str:
    """Short, for tables and sentences: "TP 8, PP 8 x 6, DP 4, micro-batch 1"."""
    chunks = f" x {layout.virtual}" if layout.virtual > 1 else ""
    return (
        f"TP {layout.tensor}, PP {layout.pipeline}{chunks}, DP {layout.data}, "
        f"micro-batch {layout.micro_batch_size}"
    )


def describe_switches(layout: Layout) -> str:
    """The rest of a layout: "interleaved_1f1b, ZeRO-1, recompute selective, shared head"."""
    words = [layout.schedule, f"ZeRO-{layout.zero_stage}", f"recompute {layout.recompute}"]
    if layout.share_head:
        words.append("shared head")
    if layout.join_weight_gradients > 1:
        words.append(f"weight gradients of {layout.join_weight_gradients} joined")
    return ", ".join(words)


def _changed(best: Layout, other: Layout) -> list[str]:
    """Switches in which the two differ: "recompute full instead of none"."""
    mine, theirs = _switches(best), _switches(other)
    return [
        f"{name} {value} instead of {mine[name]}"
        for name, value in theirs.items()
        if value != mine[name]
    ]


def _switches(layout: Layout) -> dict[str, object]:
    return {
        "schedule": layout.schedule,
        "ZeRO stage": layout.zero_stage,
        "recompute": layout.recompute,
        "shared head": "on" if layout.share_head else "off",
        "joined weight gradients": layout.join_weight_gradients,
    }
