"""A plan as text: the answer in the first three lines, then the evidence."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.plan.report.table import table
from megascale.plan.search.explain import describe_layout, describe_switches
from megascale.plan.search.parts import WORDS
from megascale.plan.search.result import Plan, Ranked, Training
from megascale.units import format_bytes, format_count

_DECIMALS = 3
_ALIKE = 0.01
_SMALL_SHARE = 0.01


def plan_text(plan: Plan) -> str:
    """For a person; `document.plan_document` is its twin for programs."""
    return "\n".join(
        [
            *_answer(plan),
            "",
            *_ranking(plan),
            "",
            *_reasons(plan),
            "",
            *_command(plan),
        ]
    )


def _answer(plan: Plan) -> Iterator[str]:
    best = plan.best
    yield f"{describe_layout(best.layout)}  ({describe_switches(best.layout)})"
    yield (
        f"  step {seconds(best.step_s)}{interval(plan)}   MFU {best.mfu:.1%} (causal "
        f"{best.mfu_causal:.1%})   {format_count(plan.tokens_per_s)} tokens/s   memory "
        f"{format_bytes(best.most_bytes)} of {format_bytes(plan.memory_bytes)} (stage "
        f"{best.fullest_stage})"
    )
    yield f"  it goes to {_shares(best)}"
    if plan.training is not None:
        yield from (f"  {line}" for line in training_lines(plan.training))
    yield f"  predicted for {plan.num_devices} x {plan.device}, cluster {plan.cluster!r}"


def _shares(one: Ranked) -> str:
    """Where the step goes, the largest part first; what is under a hundredth is left out."""
    parts = sorted(one.parts.items(), key=lambda item: -item[1])
    shares = ((WORDS[name], seconds / one.step_s) for name, seconds in parts)
    return ", ".join(f"{word} {share:.0%}" for word, share in shares if share >= _SMALL_SHARE)


def training_lines(training: Training) -> Iterator[str]:
    """Days, GPU-hours and cost: raw, and with faults."""
    raw = f"{format_count(training.tokens)} tokens: {_spent(training, 1.0)} without faults"
    if training.ettr <= 0:
        yield f"{raw}; with them it never ends: they come faster than the job recovers"
        return
    yield (
        f"{raw}; {_spent(training, training.ettr)} at the expected ETTR {training.ettr:.3f} "
        f"({training.ettr_low:.3f} to {training.ettr_high:.3f})"
    )


def _spent(training: Training, ettr: float) -> str:
    words = f"{training.days / ettr:.3g} days, {format_count(training.gpu_hours / ettr)} GPU-hours"
    if training.cost is not None:
        words += f", cost {format_count(training.cost / ettr)}"
    return words


def _ranking(plan: Plan) -> Iterator[str]:
    rows = [["", "layout", "schedule", "ZeRO", "recompute", "step s", "MFU", "memory", "by"]]
    shown, given = list(plan.ranked), plan.given
    is_first = given is not None and any(one.layout == given.layout for one in shown)
    if given is not None and not is_first:
        shown.append(given)
    names = [str(place) for place in range(1, len(plan.ranked) + 1)] + ["own"]
    rows += [_row(name, one) for name, one in zip(names, shown, strict=False)]
    for line, one in zip(table(rows, left=(1, 2, 4, 8)), [None, *shown], strict=True):
        own = one is not None and given is not None and one.layout == given.layout
        yield line + ("  <- the recipe's" if own else "")
    if given is not None and not is_first:
        more = given.step_s / plan.best.step_s - 1.0
        yield (
            f"the recipe's own layout takes {more:.1%} longer than the first; by formula it is "
            f"number {given.place:,} of the {plan.num_fit:,} that fit"
        )
    if plan.given_problem:
        yield f"the recipe's own layout is not among them: {plan.given_problem}"


def _row(place: str, one: Ranked) -> list[str]:
    layout = one.layout
    extras = " head" if layout.share_head else ""
    if layout.join_weight_gradients > 1:
        extras += f" join {layout.join_weight_gradients}"
    return [
        place,
        describe_layout(layout),
        layout.schedule + extras,
        str(layout.zero_stage),
        layout.recompute,
        f"{one.step_s:.{_DECIMALS}f}",
        f"{one.mfu:.1%}",
        format_bytes(one.most_bytes),
        "simulation" if one.simulated else "formula",
    ]


def _alike(plan: Plan) -> str:
    """The places that a prediction does not tell apart; empty where the first stands alone."""
    near = [one for one in plan.ranked if one.step_s < (1.0 + _ALIKE) * plan.best.step_s]
    if len(near) < 2:
        return ""
    least = min(near, key=lambda one: one.most_bytes)
    return (
        f"1 to {len(near)} are within {_ALIKE:.0%} of each other, which no prediction tells apart; "
        f"of them {least.place} holds least"
    )


def _reasons(plan: Plan) -> Iterator[str]:
    if alike := _alike(plan):
        yield alike
    if plan.why:
        yield f"why {plan.why[0]}"
        yield from (f"  {line}" for line in plan.why[1:])
    yield f"how sure: {confidence_line(plan)}"
    yield (
        f"searched {plan.num_legal:,} legal layouts in {plan.seconds:.1f} s: {plan.num_fit:,} fit "
        f"in {format_bytes(plan.limit_bytes)} a GPU, {plan.num_simulated} were simulated"
    )
    yield "assumed:"
    notes = [*plan.assumptions, *(plan.training.assumptions if plan.training else ())]
    yield from (f"  {note}" for note in notes)


def confidence_line(plan: Plan) -> str:
    """The interval, what it comes from, and how far this is from what was measured."""
    sure = plan.confidence
    if sure.share is None:
        return (
            f"no measured step was ever compared on cluster {plan.cluster!r}: no interval "
            f"({sure.source})"
        )
    farther = plan.num_devices / max(1, sure.largest)
    words = f"step time within {sure.share:.1%} for nine of ten of {sure.num_rows} rows of "
    words += f"{sure.source}, bias {sure.bias:+.1%}; "
    if farther > 1:
        return words + (
            f"{plan.num_devices:,} GPUs are {_times(farther)} times the largest of them "
            f"({sure.largest:,}): an extrapolation"
        )
    return words + f"the largest of them has {sure.largest:,} GPUs"


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.3g}"


def _command(plan: Plan) -> Iterator[str]:
    yield "to train with it:"
    yield f"  {plan.command[0]}" + (" \\" if len(plan.command) > 1 else "")
    for place, word in enumerate(plan.command[1:], 2):
        yield f"    {word}" + (" \\" if place < len(plan.command) else "")


def seconds(value: float) -> str:
    return f"{value:.{_DECIMALS}f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"


def interval(plan: Plan) -> str:
    """ "+- 4.1 %"; nothing where no row was compared."""
    share = plan.confidence.share
    return "" if share is None else f" +- {share:.1%}"
