"""Which ranks a timeline shows, and in which order their rows stand.

all ranks                          by stage, then data rank, then tensor rank
--ranks 0-7,12                     these
--view pipeline                    all, the members of a pipeline group beside each other
--view pipeline --rank 5           the pipeline group of rank 5, in order of the stages
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megascale.errors import ConfigError
from megascale.topology import AXES, Mesh

_MOST_LISTED = 16


@dataclass(frozen=True)
class Selection:
    """ranks  None: all; view  an axis of `topology.AXES`; rank  whose group of `view`"""

    ranks: Sequence[int] | None = None
    view: str | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.view is not None and self.view not in AXES:
            raise ConfigError(f"--view is {self.view!r}; legal: {', '.join(AXES)}")
        if self.rank is not None and self.view is None:
            raise ConfigError(
                f"--rank {self.rank} was given without --view; name the kind of group to show "
                f"({', '.join(AXES)}), or use --ranks {self.rank}"
            )
        if self.rank is not None and self.ranks is not None:
            raise ConfigError(
                f"--ranks and --rank {self.rank} were given; the group of --rank says which ranks "
                "are shown: leave one out"
            )

    def choose(self, mesh: Mesh | None, there: Collection[int]) -> list[int]:
        """Global ranks to draw, in order of their rows: also such as recorded nothing, which the
        arrows then miss. ConfigError: a rank that the run does not have."""
        every = range(mesh.world_size) if mesh is not None else sorted(there)
        wanted = list(every) if self.ranks is None else sorted(set(self.ranks))
        asked = wanted if self.rank is None else [self.rank]
        unknown = sorted(set(asked) - set(every))
        if unknown:
            raise ConfigError(
                f"ranks {unknown[:_MOST_LISTED]} are not of this run, which has "
                f"{'ranks' if len(every) else 'none'} {_ends(every)}"
            )
        if self.view is None:
            return wanted
        if mesh is None:
            raise ConfigError(
                f"--view {self.view} needs to know the degrees of parallelism, and these events "
                "have no header; give whole files"
            )
        groups = mesh.groups(self.view)
        if self.rank is not None:
            return next(group for group in groups if self.rank in group)
        chosen = set(wanted)
        return [rank for group in groups for rank in group if rank in chosen]


def parse_ranks(text: str) -> list[int]:
    """ "0-7,12" as ranks. ConfigError for anything else."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            raise ConfigError(f"ranks are {text!r}; legal: numbers and ranges, such as 0-7,12")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def _ends(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) else ""
