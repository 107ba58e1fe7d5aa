"""Which data-parallel replica holds other parameters than the rest (silent data corruption)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megascale.telemetry.diagnose.finding import Finding


def differing_replicas(
    hashes: Mapping[int, Mapping[str, int | str]],
    data_groups: Sequence[Sequence[int]],
    step: int | None = None,
) -> Finding | None:
    """The ranks whose hash of a bucket is not that of most of their data group.

    hashes       by rank and bucket, all of one step; a rank that sent none is passed over
    data_groups  instances of the group "data"

    Without a majority (two replicas, or a tie) every rank of the group that differs is named, and
    the finding is not certain: a replay says who it is.
    """
    guilty: set[int] = set()
    buckets: dict[str, list[int]] = {}
    certain = True
    for members in data_groups:
        known = [rank for rank in members if rank in hashes]
        for bucket in sorted({name for rank in known for name in hashes[rank]}):
            having: dict[int | str, list[int]] = defaultdict(list)
            for rank in known:
                if bucket in hashes[rank]:
                    having[hashes[rank][bucket]].append(rank)
            if len(having) < 2:
                continue
            most = max(len(ranks) for ranks in having.values())
            majority = 2 * most > sum(len(ranks) for ranks in having.values())
            certain = certain and majority
            odd = [
                r for ranks in having.values() if not majority or len(ranks) < most for r in ranks
            ]
            guilty.update(odd)
            buckets[bucket] = sorted({*buckets.get(bucket, ()), *odd})
    if not guilty:
        return None
    return Finding(
        kind="replicas_differ",
        ranks=tuple(sorted(guilty)),
        evidence={"buckets": buckets},
        step=step,
        group="data",
        certain=certain,
    )
