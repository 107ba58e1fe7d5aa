"""A reader's answer, and the window that it is asked about, from a query string."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from megascale.errors import DataError
from megascale.telemetry.dashboard.answers import Body, RefusedError, json_body
from megascale.telemetry.readers.answer import Reader, Window
from megascale.telemetry.store.run import Run

_OWN = frozenset({"first", "last", "ranks"})
MOST_OPTIONS = 16
MOST_RANK = 10_000_000


def reader_named(readers: Mapping[str, Reader], name: str) -> Reader:
    """RefusedError (404), with the names that there are."""
    if name not in readers:
        raise RefusedError(404, f"there is no reader {name[:60]!r}; there are {', '.join(readers)}")
    return readers[name]


def window_of(query: Mapping[str, str]) -> Window:
    """`first`, `last`, `ranks` (such as 0,8-15), everything else an option of the reader.

    RefusedError (422) for what is no such thing.
    """
    first, last = (_step(query, name) for name in ("first", "last"))
    if first is not None and last is not None and first > last:
        raise RefusedError(422, f"first is {first} and last is {last}; first comes before last")
    options = {name: value for name, value in query.items() if name not in _OWN}
    if len(options) > MOST_OPTIONS or any(len(value) > 4096 for value in options.values()):
        raise RefusedError(422, f"at most {MOST_OPTIONS} options, each of 4096 characters")
    return Window(first, last, ranks_of(query.get("ranks")), options)


def ranks_of(text: str | None) -> tuple[int, ...] | None:
    """`0,8-15` in ascending order; None for None. RefusedError (422)."""
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        begin, dash, end = part.strip().partition("-")
        if not (begin.isdecimal() and begin.isascii() and len(begin) < 9):
            raise RefusedError(422, f"ranks has {part[:40]!r}; write ranks as in 0,8-15")
        if dash and not (end.isdecimal() and end.isascii() and len(end) < 9):
            raise RefusedError(422, f"ranks has {part[:40]!r}; write ranks as in 0,8-15")
        low, high = int(begin), int(end) if dash else int(begin)
        if high < low or high - low > MOST_RANK or high > MOST_RANK:
            raise RefusedError(422, f"ranks has {part[:40]!r}; a range goes from low to high")
        ranks.update(range(low, high + 1))
    return tuple(sorted(ranks))


def key_of(name: str, query: Mapping[str, str]) -> Hashable:
    """Equal for questions with the same answer."""
    return "read", name, tuple(sorted(query.items()))


def read(run: Run, reader: Reader, window: Window) -> Body:
    """What the reader answers, with its question. What cannot be asked of this run is an answer,
    too, of level "none": most readers need more than a run that has just begun has."""
    answer: dict[str, Any]
    try:
        answer = reader.ask(run, window).as_json()
    except DataError as error:
        answer = {"level": "none", "summary": str(error), "data": {}, "caveats": []}
    return json_body({"reader": reader.name, "question": reader.question, **answer})


def listed(readers: Mapping[str, Reader]) -> Sequence[Mapping[str, str]]:
    return [{"name": one.name, "question": one.question} for one in readers.values()]


def _step(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None or text == "":
        return None
    if not (text.isdecimal() and text.isascii() and len(text) < 16):
        raise RefusedError(422, f"{name} is {text[:40]!r}; give a step, a whole number")
    return int(text)
