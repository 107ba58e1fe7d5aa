"""What a reader gives, and how it is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megascale.telemetry.store.run import Run

Level = Literal["ok", "notice", "alert"]


@dataclass(frozen=True)
class Answer:
    """What a reader found.

    level    ok: nothing wrong; notice: worth a look; alert: this is what is wrong
    summary  one sentence with the ranks, phase, group and numbers in it; also where all is well
    data     JSON values, the same that the dashboard draws; field names carry their units
    lines    the rest for a person, a line each; tables are aligned already
    caveats  what the reader could not see: missing ranks, dropped events, unreadable lines
    """

    level: Level
    summary: str
    data: Mapping[str, Any]
    lines: Sequence[str] = ()
    caveats: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "summary": self.summary,
            "data": dict(self.data),
            "caveats": list(self.caveats),
        }


@dataclass(frozen=True)
class Window:
    """Which part of a run is asked about. Steps are inclusive; None: the newest that are there.

    ranks  global ranks, None: all
    """

    first_step: int | None = None
    last_step: int | None = None
    ranks: Sequence[int] | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reader:
    """A row of `READERS`: `ask` raises DataError for what cannot be asked of this run."""

    name: str
    question: str  # as the command line's help and the dashboard's tooltip say it
    ask: Callable[[Run, Window], Answer]
