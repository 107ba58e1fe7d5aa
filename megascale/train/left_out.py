"""A rank that leaves out its part of one collective: a fault on order (`faults.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megascale.flux import collectives
from megascale.parallel.groups import Groups

SEND = 3  # the group that means a send

# What the trainer calls with the keyword `group`.
_COLLECTIVES: tuple[tuple[Any, str], ...] = (
    *((dist, name) for name in ("all_reduce", "all_to_all_single", "isend")),
    *((collectives, name) for name in ("_gather_single", "_scatter_single")),
)


def leave_out(groups: Groups, which: int) -> None:
    """Leave out this rank's part of a group's next collective, or its next send.

    which  0: of the world; 1: of the tensor group; 2: of the data group; SEND: to a neighbour of
           the pipeline
    """
    wanted = (None, groups.tensor, groups.data)[which] if which < SEND else None
    places = [(m, name) for m, name in _COLLECTIVES if (name == "isend") == (which == SEND)]
    real = [getattr(module, name) for module, name in places]

    def leaving_out(call: Callable[..., Any]) -> Callable[..., Any]:
        def once(*values: Any, **named: Any) -> Any:
            if which != SEND and named.get("group") is not wanted:
                return call(*values, **named)
            for (module, name), before in zip(places, real, strict=True):
                setattr(module, name, before)
            return _Done()

        return once

    for (module, name), call in zip(places, real, strict=True):
        setattr(module, name, leaving_out(call))


class _Done:
    """What a collective returns, of one that did not take place."""

    def wait(self, *_arguments: object) -> bool:
        return True
