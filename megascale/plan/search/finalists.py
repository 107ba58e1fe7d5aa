"""Which layouts are simulated: the fastest by formula, but not twenty of one kind.

Layouts that differ in a detail differ by less than the formula's error, and what it simplifies
(halves, a shared head, joined weight gradients) is alike for a whole kind. So of each way to cut
the job (tensor, pipeline, data, micro-batch) the best of each kind is taken, a few kinds, in the
order of the formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megascale.plan.case import Layout
from megascale.plan.search.space import Integers, Space

NUM_FINALISTS = 20
_KINDS_OF_A_GROUP = 4
_LOOKED_AT = 20_000  # of the formula's order
_ALL_COMPUTES = 2  # times a schedule's most: what all finalists may have together


def choose_finalists(
    space: Space,
    order: Integers,
    *,
    num_groups: int,
    most_computes: int,
    fits: Callable[[Layout], bool],
) -> list[Layout]:
    """About NUM_FINALISTS of `space`, in `order`, whose schedules can be simulated in seconds.

    num_groups     that are wanted
    fits           whether its memory does, exactly
    most_computes  of one schedule; all of them together may have a few times as many
    """
    found: list[Layout] = []
    kinds: set[tuple[object, ...]] = set()
    groups: Counter[tuple[int, ...]] = Counter()
    computes = 0
    num_layouts = max(NUM_FINALISTS, num_groups)
    of_a_group = max(1, min(_KINDS_OF_A_GROUP, num_layouts // num_groups))
    for place in order[:_LOOKED_AT]:
        layout = space.layout(int(place))
        group, kind = group_of(layout), kind_of(layout)
        if groups[group] == of_a_group or kind in kinds:
            continue
        own = min(most_computes, num_computes(layout, int(space.micro_batches[place])))
        if found and computes + own > _ALL_COMPUTES * most_computes:
            break
        if not fits(layout):
            continue
        computes += own
        kinds.add(kind)
        groups[group] += 1
        found.append(layout)
        if len(found) == num_layouts:
            break
    return found


def group_of(layout: Layout) -> tuple[int, ...]:
    """How the job is cut."""
    return layout.tensor, layout.pipeline, layout.data, layout.micro_batch_size


def kind_of(layout: Layout) -> tuple[object, ...]:
    """Group, and what the formula treats alike."""
    joins = layout.join_weight_gradients > 1
    return (*group_of(layout), layout.schedule, layout.share_head, joins)


def num_computes(layout: Layout, micro_batches: int) -> int:
    """Of all stages' action lists together: what a simulation's time follows."""
    kinds = 3 if "zb" in layout.schedule or layout.join_weight_gradients > 1 else 2
    return kinds * layout.num_chunks * micro_batches
