"""Names of nodes: lists with ranges, as Slurm and people write them, and their natural order."""

from __future__ import annotations

import re

from megascale.errors import ConfigError

_PART = re.compile(r"([^,\[\]\s]*)(?:\[([^\]\[]*)\])?([^,\[\]\s]*)$")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
MOST_NAMES = 1_000_000  # of one list; a digit too many would fill memory before any check of names


def expand(text: str) -> list[str]:
    """'gpu[003-005,9]-a,cpu1' -> gpu003-a, gpu004-a, gpu005-a, gpu9-a, cpu1."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text):
        found = _PART.match(part.strip())
        if not found or not (found[1] or found[2]):
            raise _not_a_list(text)
        if found[2] is None:
            names.append(found[1] + found[3])
            continue
        names += [f"{found[1]}{number}{found[3]}" for number in _numbers(found[2], text)]
    if not names:
        raise _not_a_list(text)
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.match(part.strip())
        if not found:
            raise _not_a_list(text)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ConfigError(
                f"nodes {text!r}: the range {part} runs backwards; write {last}-{first}"
            )
        if len(numbers) + int(last) - int(first) >= MOST_NAMES:
            raise ConfigError(
                f"nodes {text!r}: the range {part} names {int(last) - int(first) + 1:,} nodes; "
                f"legal are {MOST_NAMES:,} in one list: is a digit too many?"
            )
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _not_a_list(text: str) -> ConfigError:
    return ConfigError(
        f"nodes {text!r} is not a list of names; legal: names and ranges with commas between, such "
        "as 'gpu[000-063],gpu100'"
    )


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key by which node-2 comes before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)
