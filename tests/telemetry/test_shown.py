"""How things are written for a person: one is not several."""

from __future__ import annotations

import re
from pathlib import Path

from megascale.telemetry.shown import counted, named, ranks_text

PACKAGE = Path(__file__).parents[2] / "megascale" / "telemetry"
# a number in braces, then a plain plural: it would say "1 ranks"; `of 8 ranks` is a whole, not one
PLURAL = re.compile(
    r"""(?<!of\ )\{[^{}'"]*\}\ (?:more\ )?
    (?:ranks|hosts|nodes|steps|events|lines|spans|segments|samples|ports|starts|windows)\b""",
    re.VERBOSE,
)
# at least two, or a limit
KNOWN = (
    "{steps[1]!r} steps from",
    "_MOST_STEPS}",
    "MOST_SPANS}",
    "MOST_RANKS}",
    "{len(at)} hosts",
    "world_size:,} ranks",
)


def test_one_and_several() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2, 12_288)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "12,288 ranks",
    ]
    assert counted(2, "launch", "launches") == "2 launches"
    assert (named([5]), named([7, 5, 6])) == ("rank 5", "ranks 5-7")
    assert ranks_text([1, 3, 5, 7], most=2) == "1, 3 and 2 more"


def test_no_sentence_says_one_ranks() -> None:
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if PLURAL.search(line) and not any(known in line for known in KNOWN)
    ]
    assert not found
