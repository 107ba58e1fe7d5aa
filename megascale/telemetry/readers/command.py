"""`megascale diagnose`: asks a reader, and prints its answer for a person or as JSON.

Lines are wrapped to the terminal; tables fit into 100 columns by themselves. Without a terminal
there is no colour. What is found does not make the verb fail, unless --fail-on asks for that.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError
from megascale.telemetry.readers import QUESTIONS, READERS
from megascale.telemetry.readers.answer import Answer, Level, Window
from megascale.telemetry.shown import table
from megascale.telemetry.store.run import Run, open_run
from megascale.telemetry.timeline.selection import parse_ranks
from megascale.units import format_bytes

WIDEST = 100  # characters
WORTH_TELLING_BYTES = 256 << 20
MOST_ROWS = 200  # of --sql, for a person
FOUND = 1  # exit code of --fail-on
_LEVELS: Sequence[Level] = ("ok", "notice", "alert")
_STYLES: Mapping[Level, str] = {"ok": "green", "notice": "yellow", "alert": "bold red"}
Say = Callable[[str], object]


@dataclass(frozen=True)
class Request:
    """The command line's arguments, as they were given: RUN [READER], or RUN RUN ... to compare."""

    arguments: Sequence[str]
    first_step: int | None = None
    last_step: int | None = None
    ranks: str | None = None
    options: Sequence[str] = ()
    compare: bool = False
    sql: str | None = None
    as_json: bool = False
    fail_on: str | None = None


def reader_lines() -> list[str]:
    """The readers and their questions."""
    width = max(map(len, QUESTIONS))
    return [f"{name:{width}}  {question}" for name, question in QUESTIONS.items()]


def diagnose_run(request: Request, say: Say) -> int:
    """The exit code. ConfigError: this is no request; DataError: the run cannot be asked it."""
    run_dir, name, window = _checked(request)
    with open_run(run_dir, progress=_Progress()) as run:
        if request.sql is not None:
            _print_rows(run, request, say)
            return 0
        answer = READERS[name].ask(run, window)
    if request.as_json:
        say(json.dumps(answer.as_json(), allow_nan=False))
    else:
        _print_answer(name, answer)
    fails = _LEVELS[_LEVELS.index(request.fail_on) :] if request.fail_on in _LEVELS else ()
    return FOUND if answer.level in fails else 0


def _checked(request: Request) -> tuple[Path, str, Window]:
    """The run, the reader and what it is asked about."""
    options = {}
    for given in request.options:
        key, equals, value = given.partition("=")
        if not equals:
            raise ConfigError(f"--option is {given!r}; legal: NAME=VALUE")
        options[key] = value
    if not request.arguments:
        raise ConfigError("give the folder of a run: megascale diagnose RUN; --list shows readers")
    run_dir, *more = request.arguments
    if request.compare:
        if not more:
            raise ConfigError("--compare needs two runs or more: megascale diagnose --compare A B")
        name, options["with"] = "compare", ",".join(more)
    elif len(more) > 1:
        raise ConfigError(f"legal is RUN [READER], got {list(request.arguments)}; or --compare")
    else:
        name = more[0] if more else "summary"
    if name not in READERS:
        near = difflib.get_close_matches(name, READERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no reader {name!r}; {hint}legal: {', '.join(READERS)}")
    if request.fail_on not in (None, "notice", "alert"):
        raise ConfigError(f"--fail-on is {request.fail_on!r}; legal: notice, alert")
    ranks = None if request.ranks is None else parse_ranks(request.ranks)
    return Path(run_dir), name, Window(request.first_step, request.last_step, ranks, options)


class _Progress:
    """Tells on stderr how far a large run is stored, a few times."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        part = 10 * done_bytes // max(1, all_bytes)
        if all_bytes >= WORTH_TELLING_BYTES and part > self._told:
            self._told = part
            done, of = format_bytes(done_bytes), format_bytes(all_bytes)
            print(f"storing what is new of the run: {done} of {of}", file=sys.stderr)


def _print_answer(name: str, answer: Answer) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = min(WIDEST, console.width) if console.is_terminal else WIDEST
    console.width = width
    head = Text.assemble((f"{answer.level}  ", _STYLES[answer.level]), (f"{name}: ", "bold"))
    console.print(head + Text(answer.summary))
    for line in answer.lines:
        console.print(Text(line))
    for caveat in answer.caveats:
        console.print(Text(f"caveat: {caveat}", style="dim"))


def _print_rows(run: Run, request: Request, say: Say) -> None:
    assert request.sql is not None
    found = run.query(request.sql)
    rows: list[dict[str, Any]] = found.to_pylist()
    if request.as_json:
        say(json.dumps(rows, default=str, allow_nan=False))
        return
    head = list(found.column_names)
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    for line in table([head, *cells[:MOST_ROWS]]):
        say(line)
    if len(rows) > MOST_ROWS:
        say(f"{len(rows) - MOST_ROWS} more rows; --json gives all")
