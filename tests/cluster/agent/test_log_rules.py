"""Rules against a labelled set, and a log reader that a storm does not drown."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megascale.cluster.agent.log_reader import BURST_BYTES, TAIL_BYTES, LogReader, find
from megascale.cluster.agent.log_rules import RULES, classify

PRECISION = RECALL = 0.95
LINES = [
    (None if label == "-" else label, line)
    for label, _, line in (
        row.partition("\t")
        for row in Path(__file__).with_name("labelled_lines.txt").read_text().splitlines()
        if not row.startswith("#")
    )
]


def test_precision_and_recall_on_the_labelled_lines() -> None:
    wrong, right, missed = [], 0, []
    for wanted, line in LINES:
        rule = classify(line)
        said = rule.name if rule else None
        if said is not None and said != wanted:
            wrong.append((said, wanted, line))
        elif said is not None:
            right += 1
        elif wanted is not None:
            missed.append((wanted, line))
    assert right / (right + len(wrong)) >= PRECISION, wrong
    assert right / (right + len(missed)) >= RECALL, missed


def test_the_set_has_every_rule_and_as_many_lines_that_mean_nothing() -> None:
    labels = [wanted for wanted, _ in LINES]
    assert {rule.name for rule in RULES} == set(labels) - {None}
    assert labels.count(None) >= 50


@pytest.mark.parametrize(("wanted", "line"), LINES, ids=range(len(LINES)))
def test_the_reader_finds_what_the_rules_find(wanted: str | None, line: str) -> None:
    """The search for words must not lose a line that a rule would have spoken for."""
    rule = classify(line)
    found = list(find(f"before\n{line}\nafter\n".encode()))
    assert found == ([(rule, line)] if rule else [])


def test_a_traceback_gives_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "step 1\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "train.py", line 3, in <module>\n'
        "[rank0]:     step()\n"
        "[rank0]:     ~~~~^^\n"
    )
    reader = LogReader(log)
    assert reader.read() == [], "it has not ended yet"
    with log.open("a") as file:
        file.write("[rank0]: my.ShapeError: 3 is not 4\nstep 2\n")
    (match,) = reader.read()
    assert (match.rule.name, match.rule.kind) == ("python_exception", "exception")
    assert match.line == "[rank0]: my.ShapeError: 3 is not 4"
    assert reader.read() == []


def test_a_traceback_of_a_known_kind_is_told_once_as_that_kind() -> None:
    text = "Traceback (most recent call last):\n  File x\nOSError: [Errno 28] No space left on d"
    text += "evice\n"
    assert [(rule.name, line) for rule, line in find(text.encode())] == [
        ("disk_full", "OSError: [Errno 28] No space left on device")
    ]


def test_half_lines_wait_for_their_other_half(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ConnectionResetError: [Errno 10")
    reader = LogReader(log)
    assert reader.read() == []
    with log.open("a") as file:
        file.write("4] Connection reset by peer\n")
    assert [match.rule.name for match in reader.read()] == ["connection"]


def test_it_begins_at_its_offset_and_survives_a_cut_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    old = "MemoryError\n" * 3
    log.write_text(old + "Fatal Python error: Aborted\n")
    reader = LogReader(log, len(old))
    assert [match.rule.name for match in reader.read()] == ["crash"]
    log.write_text("MemoryError\n")
    assert [match.rule.name for match in reader.read()] == ["host_out_of_memory"]


def test_a_storm_costs_a_bounded_amount_and_its_end_is_seen(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        file.write("ConnectionResetError: [Errno 104] Connection reset by peer\n" * 1_000_000)
        file.write("MemoryError\n")
    reader = LogReader(log)
    began_s = time.process_time()
    first = reader.read()
    rest = [match for _ in range(20) for match in reader.read()]
    last = reader.read(last=True)
    assert time.process_time() - began_s < 1.0
    assert reader.skipped_bytes > log.stat().st_size - BURST_BYTES - TAIL_BYTES
    assert len(first) + len(rest) + len(last) < 2_000
    assert [match.rule.name for match in first][-1] == "host_out_of_memory"


def test_it_holds_little_of_a_line_without_an_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reader = LogReader(log)
    for _ in range(8):
        with log.open("a") as file:
            file.write("x" * (100 << 10))
        reader.read()
        assert len(reader._held) <= TAIL_BYTES
