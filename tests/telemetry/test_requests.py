"""Request and answer files: what is legal, and what is said of the rest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import ConfigError, DataError, LaunchError
from megascale.events import Step as StepEvent
from megascale.events import Sums, run_header, to_line
from megascale.telemetry.profiling import profile_run, where_is
from megascale.telemetry.requests import (
    Answer,
    Request,
    parse_request,
    read_answers,
    requests_folder,
    write_answer,
    write_request,
)
from megascale.telemetry.writer import line_file
from megascale.topology import Mesh


def test_a_request_comes_back_as_it_was_written(tmp_path: Path) -> None:
    for ranks in (None, (0, 5)):
        request = Request(f"name-{ranks is None}", "torch", 7, 3, ranks)
        path = write_request(tmp_path, request)
        assert parse_request(path.stem, path.read_text()) == request
    assert [p.name for p in requests_folder(tmp_path).glob(".*")] == []


def test_a_name_is_given_once(tmp_path: Path) -> None:
    write_request(tmp_path, Request("mine", "spans", 7, 1))
    with pytest.raises(ConfigError, match="choose another --name"):
        write_request(tmp_path, Request("mine", "torch", 9, 1))
    text = (requests_folder(tmp_path) / "mine.json").read_text()
    assert json.loads(text)["what"] == "spans"


def test_two_in_one_second_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path)
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 0, 0, 0)))
    for _ in range(2):
        with pytest.raises(LaunchError, match="did not answer in 0 s"):
            profile_run(tmp_path, what="spans", num_steps=1, ranks=[2], timeout_s=1e-3)
    names = sorted(path.stem for path in requests_folder(tmp_path).glob("*.json"))
    assert names == ["spans-20260102-030405", "spans-20260102-030405-2"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("../x", "{}", "legal: letters, digits"),
        (".x", "{}", "legal: letters, digits"),
        ("x", '{"what": "torch", "first_', "is no JSON"),
        ("x", "[1]", "must be an object with what and first_step"),
        ("x", '{"what": "torch"}', "must be an object with what and first_step"),
        ("x", '{"what": "torch", "first_step": 3, "steps": 2}', "must be an object"),
        ("x", '{"what": "cpu", "first_step": 3}', "legal: spans, torch, memory, monitor"),
        ("x", '{"what": "torch", "first_step": "3"}', "legal: whole numbers"),
        ("x", '{"what": "torch", "first_step": true}', "legal: whole numbers"),
        ("x", '{"what": "torch", "first_step": 0}', "legal: whole numbers"),
        ("x", '{"what": "torch", "first_step": 3, "num_steps": 1001}', "at most 1000 steps"),
        ("x", '{"what": "torch", "first_step": 3, "ranks": []}', "a list of ranks, or null"),
        ("x", '{"what": "torch", "first_step": 3, "ranks": "0"}', "a list of ranks, or null"),
    ],
)
def test_what_is_no_request(name: str, text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse_request(name, text)


def test_answers_are_read_as_far_as_they_are_there(tmp_path: Path) -> None:
    assert read_answers(tmp_path, "x", range(4)) == {}
    done = Answer(2, "done", path="profiles/x/rank_00002.pickle", first_step=4, last_step=6)
    write_answer(tmp_path, "x", Answer(2, "accepted"))
    write_answer(tmp_path, "x", done)
    write_answer(tmp_path, "x", Answer(0, "refused", "because"))
    write_answer(tmp_path, "other", Answer(1, "accepted"))
    assert read_answers(tmp_path, "x", range(4)) == {0: Answer(0, "refused", "because"), 2: done}


# ---------------------------------------------------------------- the command


def a_run(folder: Path, *, steps: int = 40, more: str = "") -> None:
    """What a rank of four has written, of steps of half a second."""
    path = line_file(folder, 0)
    path.parent.mkdir(parents=True)
    lines = [to_line(run_header(Mesh(data=4), 0, host="node0"))]
    for step in range(1, steps + 1):
        lines.append(
            to_line(Sums(rank=0, step=step, sums={"forward": {"total_ns": 1, "count": 1}}))
        )
        times: dict[str, Any] = {"t0_ns": step * 500_000_000, "dur_ns": 500_000_000}
        lines.append(to_line(StepEvent(rank=0, step=step, clock="host", sampled=False, **times)))
    path.write_text("".join(lines) + more)


def test_where_a_run_is(tmp_path: Path) -> None:
    a_run(tmp_path, more='{"v":1,"kind":"step","ra')
    moment = where_is(tmp_path)
    assert (moment.step, moment.step_s, moment.world_size) == (40, 0.5, 4)
    # three seconds of lead are six steps, behind two that are under way
    assert moment.step_ahead() == 40 + 2 + 1 + 6


def test_the_pace_is_that_of_the_usual_step(tmp_path: Path) -> None:
    """The newest one may have waited for a checkpoint, or run alone on its machine."""
    for newest_s in (30.0, 0.001):
        times: dict[str, Any] = {"t0_ns": 20_500_000_000, "dur_ns": int(newest_s * 1e9)}
        newest = StepEvent(rank=0, step=41, clock="host", sampled=False, **times)
        a_run(tmp_path / str(newest_s), more=to_line(newest))
        moment = where_is(tmp_path / str(newest_s))
        assert (moment.step, moment.step_s) == (41, 0.5)


def test_ranks_that_were_past_the_step_are_asked_again_further_ahead(tmp_path: Path) -> None:
    a_run(tmp_path)
    late = "step 49 has begun; this is step 60"
    write_answer(tmp_path, "mine", Answer(2, "refused", late))
    write_answer(tmp_path, "mine-2", Answer(2, "done", path="x", first_step=55, last_step=56))
    said: list[str] = []
    profile_run(tmp_path, what="torch", num_steps=2, ranks=[2], name="mine", say=said.append)
    assert [line for line in said if line.startswith("asked")] == [
        "asked 1 rank for torch of steps 49 to 50; the newest step is 40, a step takes 0.500 s",
        "asked 1 rank for torch of steps 55 to 56; the newest step is 40, a step takes 0.500 s",
    ]
    assert said[1] == "rank 2 had begun step 49 before the request was found: asking again"
    write_answer(tmp_path, "own", Answer(2, "refused", late))
    with pytest.raises(LaunchError, match="request own: rank 2: step 49 has begun"):
        profile_run(tmp_path, what="torch", num_steps=2, ranks=[2], first_step=49, name="own")


def test_a_long_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path, steps=400)
    monkeypatch.setattr("megascale.telemetry.profiling._TAIL_BYTES", 1000)
    assert where_is(tmp_path).step == 400
    assert where_is(tmp_path).world_size == 4


def test_runs_that_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"telemetry\.enable = true"):
        where_is(tmp_path)
    a_run(tmp_path, steps=0)
    for whole in (True, False):  # and while the header is being written
        with pytest.raises(DataError, match="has finished no step yet"):
            where_is(tmp_path)
        for file in (tmp_path / "telemetry").glob("rank_*.jsonl"):
            file.write_bytes(file.read_bytes()[:10] if whole else b"")


def test_ranks_that_the_run_does_not_have_are_not_asked(tmp_path: Path) -> None:
    a_run(tmp_path)
    with pytest.raises(ConfigError, match=r"ranks \[4\] are not of this run.*0 to 3"):
        profile_run(tmp_path, what="torch", num_steps=1, ranks=[0, 4])
    with pytest.raises(ConfigError, match="asks for 'everything'"):
        profile_run(tmp_path, what="everything", num_steps=1, ranks=None)
    assert not requests_folder(tmp_path).exists()
