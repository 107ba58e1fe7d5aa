"""The table of public bug reports in docs/reliability.md: whole, and its tests and faults exist."""

from __future__ import annotations

import re

import pytest

from megascale.cluster.chaos.faults import KINDS
from tools.blocks import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


def test_every_report_has_its_row() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 30))


@pytest.mark.parametrize(("number", "answer"), [(row[0], row[3]) for row in ROWS])
def test_the_answer_is_a_test_a_fault_or_a_reason(number: str, answer: str) -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", answer)
    for file, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test
    faults = [
        word
        for part in re.findall(r"faults? (`[^;:]*`)", answer)
        for word in re.findall(r"`(\w+)`", part)
    ]
    assert not [fault for fault in faults if fault not in KINDS]
    assert named or faults or "cannot occur" in answer, f"report {number}"


def test_every_kind_stands_in_the_page() -> None:
    table = PAGE[PAGE.index("## Faults") : PAGE.index("## What was measured")]
    assert {*re.findall(r"`(\w+)`", table)} >= {*KINDS}
