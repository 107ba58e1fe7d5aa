"""Why a rank ended, and which rank of the node ended first. Pure.

Sources in this order: the error that the rank recorded itself, the kernel's out-of-memory killer,
the first rule that its log matched, its signal or exit code.
"""

from __future__ import annotations

from collections.abc import Mapping

from megascale.cluster.messages import Failure

CASCADE_S = 5.0  # within it, what peers see of a failure may carry an earlier time than its cause
_SECOND_HAND = frozenset({"network"})


def first_failed(failures: Mapping[int, Failure]) -> int | None:
    """The rank that the others' failures follow from; None without failures.

    The earliest, unless it is one that a dying peer causes and another cause came soon after.
    """
    if not failures:
        return None
    earliest_ns = min(failure.unix_ns for failure in failures.values())
    near = {
        rank: failure
        for rank, failure in failures.items()
        if failure.unix_ns - earliest_ns <= CASCADE_S * 1e9
    }
    return min(near, key=lambda rank: (near[rank].kind in _SECOND_HAND, near[rank].unix_ns, rank))
