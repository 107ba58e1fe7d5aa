"""Which layouts are simulated: the fastest by formula, but not twenty of one kind.

Layouts that differ in a detail differ by less than the formula's error, and what it simplifies
(halves, a shared head, joined weight gradients) is alike for a whole kind. So of each way to cut
the job (tensor, pipeline, data, micro-batch) the best of each kind is taken, a few kinds: first
many in the order of the formula on an ideal cluster, and of these those that are still the fastest
where the network is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from megascale.plan.case import Layout
from megascale.plan.search.space import Integers, Space

NUM_FINALISTS = 20
NUM_CANDIDATES = 60
_KINDS_OF_A_GROUP = 4
_LOOKED_AT = 20_000  # of the formula's order
_ALL_COMPUTES = 2  # times a schedule's most: what all finalists may have together


def candidates(space: Space, order: Integers, *, num_groups: int) -> list[Layout]:
    """The first of each kind, in `order`, at most a few kinds of a group; groups as wanted."""
    found: dict[tuple[object, ...], Layout] = {}
    groups: Counter[tuple[int, ...]] = Counter()
    most = max(NUM_CANDIDATES, num_groups)
    for place in order[:_LOOKED_AT]:
        layout = space.layout(int(place))
        group, kind = group_of(layout), kind_of(layout)
        if groups[group] == _KINDS_OF_A_GROUP or kind in found:
            continue
        groups[group] += 1
        found[kind] = layout
        if len(found) == most:
            break
    return list(found.values())


def finalists(
    ordered: Sequence[Layout],
    *,
    num_groups: int,
    most_computes: int,
    computes_of: Callable[[Layout], int],
    fits: Callable[[Layout], bool],
) -> list[Layout]:
    """About NUM_FINALISTS of `ordered`, whose schedules can be simulated in seconds.

    fits           whether its memory does, exactly
    most_computes  of one schedule; all of them together may have a few times as many
    """
    num_layouts = max(NUM_FINALISTS, num_groups)
    of_a_group = max(1, min(_KINDS_OF_A_GROUP, num_layouts // num_groups))
    found: list[Layout] = []
    groups: Counter[tuple[int, ...]] = Counter()
    computes = 0
    for layout in ordered:
        group = group_of(layout)
        own = min(most_computes, computes_of(layout))
        if groups[group] == of_a_group:
            continue
        if found and computes + own > _ALL_COMPUTES * most_computes:
            break
        if not fits(layout):
            continue
        computes += own
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
