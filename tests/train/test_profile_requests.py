"""`megascale profile` of a run that lives: what ranks do with a request, good or bad.

The hook alone first, its steps driven by hand; then a real run of two ranks, profiled from outside.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megascale.cli import app
from megascale.errors import ConfigError, LaunchError
from megascale.events import Span, read_events
from megascale.telemetry.clock import MonotonicClock
from megascale.telemetry.profiling import profile_run, when_it_steps, where_is
from megascale.telemetry.recorder import Recorder
from megascale.telemetry.requests import (
    Answer,
    Request,
    answer_file,
    read_answer,
    requests_folder,
    write_request,
)
from megascale.telemetry.writer import line_file
from megascale.train import profile_requests
from megascale.train.profile_requests import ProfileRequests
from megascale.train.profilers import profilers
from tests.train.command import SMALL, end, flags, num_lines, started, wait_until, write_recipe

DEADLINE_S = 20.0
# Nobody reads what the run prints: a line each step fills the pipe, and rank 0 stands in its write.
ENDLESS = ("training.steps=100000", "checkpoint.enable=false", "metrics.log_interval=50")


class Rank:
    """A rank whose steps are driven by hand, and which looks for requests all the time."""

    def __init__(self, run_dir: Path, rank: int = 0, world_size: int = 2) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.events: list[object] = []
        self.recorder = Recorder(
            MonotonicClock(), self.events.append, rank=rank, span_interval=10**6
        )
        cpu = torch.device("cpu")
        makers = profilers(run_dir, self.recorder, cpu, line_file(run_dir, rank))
        self.hook = ProfileRequests(run_dir, rank, world_size, makers)
        self.recorder.hooks.append(self.hook)
        self.step = 0

    def steps(self, last: int) -> None:
        while self.step < last:
            self.step += 1
            with self.recorder.step(self.step), self.recorder.span("forward"):
                torch.ones(4).square().sum()

    def answer(self, name: str, state: str | None = None) -> Answer:
        return answered(self.run_dir, name, self.rank, state)


def answered(run_dir: Path, name: str, rank: int, state: str | None = None) -> Answer:
    """The answer, once it is there (and of that state)."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        answer = read_answer(run_dir, name, rank)
        if answer is not None and state in (None, answer.state):
            return answer
        time.sleep(0.005)
    raise AssertionError(f"no answer {state} of rank {rank} to {name} in {DEADLINE_S} s")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    monkeypatch.setattr(profile_requests, "LOOK_INTERVAL_S", 0.005)
    made: list[Rank] = []

    def make(rank: int = 0, world_size: int = 2) -> Rank:
        made.append(Rank(tmp_path, rank, world_size))
        return made[-1]

    yield make
    for one in made:
        one.hook.close()


def ask(run_dir: Path, name: str, what: str, first: int, steps: int = 2, **more: object) -> None:
    write_request(run_dir, Request(name, what, first, steps, **more))  # type: ignore[arg-type]


def test_spans_of_exactly_the_steps_that_were_asked_for(
    tmp_path: Path, make: Callable[..., Rank]
) -> None:
    rank = make()
    rank.steps(3)
    ask(tmp_path, "a", "spans", 6, 2)
    rank.answer("a", "accepted")
    rank.steps(12)
    answer = rank.answer("a", "done")
    assert (answer.first_step, answer.last_step) == (6, 7)
    assert answer.path == "telemetry/rank_00000.jsonl"
    assert [e.step for e in rank.events if isinstance(e, Span)] == [6, 7]


@pytest.mark.full
def test_a_torch_profile(tmp_path: Path, make: Callable[..., Rank]) -> None:
    rank = make()
    ask(tmp_path, "a", "torch", 2, 2)
    rank.answer("a", "accepted")
    rank.steps(5)
    answer = rank.answer("a", "done")
    assert answer.path == "profiles/a/rank_00000.trace.json.gz"
    with gzip.open(tmp_path / answer.path) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::square") == 2  # one a step, of two steps
    assert [path.name for path in (tmp_path / "profiles" / "a").iterdir()] == [
        "rank_00000.trace.json.gz"
    ]


def test_one_after_the_other(tmp_path: Path, make: Callable[..., Rank]) -> None:
    rank = make()
    for number in range(3):
        ask(tmp_path, f"r{number}", "spans", rank.step + 2, 1)
        rank.answer(f"r{number}", "accepted")
        rank.steps(rank.step + 4)
        rank.answer(f"r{number}", "done")


def test_two_at_once_the_second_is_refused(tmp_path: Path, make: Callable[..., Rank]) -> None:
    rank = make()
    ask(tmp_path, "first", "spans", 5)
    rank.answer("first", "accepted")
    ask(tmp_path, "second", "spans", 8)
    assert rank.answer("second", "refused").why == "busy with request first; one at a time"
    rank.steps(9)
    rank.answer("first", "done")


def test_a_step_in_the_past(tmp_path: Path, make: Callable[..., Rank]) -> None:
    rank = make()
    rank.steps(5)
    ask(tmp_path, "a", "spans", 5)
    answer = rank.answer("a", "refused")
    assert answer.why == "step 5 has begun; this is step 5"
    assert answer.came_late


def test_a_request_that_is_found_while_its_step_begins(
    tmp_path: Path, make: Callable[..., Rank]
) -> None:
    """Taken by the thread when the loop is behind its look at the window already."""
    rank = make()
    ask(tmp_path, "a", "spans", 1)
    rank.answer("a", "accepted")
    rank.step = 1  # the loop began step 1 just before
    rank.steps(2)
    answer = rank.answer("a", "refused")
    assert answer.why == "step 1 had begun when the request was found; this is step 2"
    assert answer.came_late


def test_ranks_that_are_not_asked_say_nothing(tmp_path: Path, make: Callable[..., Rank]) -> None:
    zero, one = make(0), make(1)
    ask(tmp_path, "a", "spans", 2, 1, ranks=(1,))
    one.answer("a", "accepted")
    one.steps(3)
    one.answer("a", "done")
    zero.steps(3)
    assert read_answer(tmp_path, "a", 0) is None
    assert [e for e in zero.events if isinstance(e, Span)] == []


def test_ranks_that_do_not_exist_rank_0_says_it(tmp_path: Path, make: Callable[..., Rank]) -> None:
    zero, _ = make(0), make(1)
    ask(tmp_path, "a", "spans", 2, 1, ranks=(1, 7))
    assert zero.answer("a", "refused").why == "ranks [7] are not of this run, which has 2"


def test_half_a_file_is_waited_for_and_nonsense_is_answered(
    tmp_path: Path, make: Callable[..., Rank]
) -> None:
    rank = make()
    folder = requests_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "nonsense.json").write_text('{"what": "torch", ')
    assert "nonsense is no JSON" in rank.answer("nonsense", "refused").why
    (folder / "bad name.json").write_text("{}")
    assert "legal: letters" in rank.answer("bad name", "refused").why
    (folder / "binary.json").write_bytes(b"\xff\x00\x80")
    assert "binary is no JSON" in rank.answer("binary", "refused").why
    (folder / "folder.json").mkdir()
    assert rank.answer("folder", "refused").why == "folder.json cannot be read: Is a directory"
    ask(tmp_path, "good", "spans", 3, 1)
    rank.answer("good", "accepted")


def test_a_file_that_is_written_in_pieces(
    tmp_path: Path, make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_requests, "LOOK_INTERVAL_S", 0.05)
    rank = make()
    folder = requests_folder(tmp_path)
    folder.mkdir(parents=True)
    text = '{"what": "spans", "first_step": 4}'
    with (folder / "slow.json").open("w") as file:
        for letter in text:
            file.write(letter)
            file.flush()
            time.sleep(0.005)
    rank.answer("slow", "accepted")
    rank.steps(5)
    rank.answer("slow", "done")


def test_memory_of_a_cpu_is_not_there(tmp_path: Path, make: Callable[..., Rank]) -> None:
    rank = make()
    ask(tmp_path, "a", "memory", 3)
    assert "this rank trains on a CPU" in rank.answer("a", "refused").why


def test_a_profiler_that_fails_is_an_answer(
    tmp_path: Path, make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make()

    def broken(_num_steps: int = 1) -> None:
        raise RuntimeError("no counters left")

    monkeypatch.setattr(rank.recorder, "request_spans", broken)
    ask(tmp_path, "a", "spans", 2)
    rank.answer("a", "accepted")
    rank.steps(3)
    assert rank.answer("a", "refused").why == "RuntimeError: no counters left"


@pytest.mark.full
def test_a_profile_that_cannot_be_written_is_an_answer(
    tmp_path: Path, make: Callable[..., Rank]
) -> None:
    rank = make()
    ask(tmp_path, "a", "torch", 6, 1)
    rank.answer("a", "accepted")
    (tmp_path / "profiles").write_text("in the way")
    rank.steps(7)
    assert rank.answer("a", "refused").why.startswith("it could not be written: NotADirectory")


def test_what_a_node_is_asked_for_is_passed_over(tmp_path: Path, make: Callable[..., Rank]) -> None:
    rank = make()
    ask(tmp_path, "a-monitor", "monitor", 2)
    ask(tmp_path, "b-spans", "spans", 3)
    rank.answer("b-spans", "accepted")
    assert read_answer(tmp_path, "a-monitor", 0) is None


def test_the_end_of_the_run_is_an_answer(tmp_path: Path, make: Callable[..., Rank]) -> None:
    rank = make()
    rank.steps(2)
    ask(tmp_path, "a", "torch", 90)
    rank.answer("a", "accepted")
    rank.hook.close()
    assert rank.answer("a", "refused").why == "the run ended at step 2"


def test_what_was_asked_of_an_earlier_start(tmp_path: Path, make: Callable[..., Rank]) -> None:
    ask(tmp_path, "old", "spans", 90)
    rank = make()
    assert "started after the request was made" in rank.answer("old", "refused").why
    ask(tmp_path, "new", "spans", 4, 1)
    rank.answer("new", "accepted")
    rank.steps(5)
    rank.answer("new", "done")
    rank.hook.close()
    again = make()  # a rank that restarts keeps the answers of before
    again.steps(2)
    assert again.answer("new").state == "done"


# ---------------------------------------------------------------- a run


def _wait_for_steps(run: Path, process: object, count: int = 3) -> None:
    wait_until(lambda: num_lines(run / "metrics.jsonl") >= count, process)  # type: ignore[arg-type]


@pytest.mark.full
def test_a_run_is_profiled_while_it_lives(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*SMALL, *ENDLESS, f"job.run_dir={run}"]
    arguments = ["train", str(write_recipe(tmp_path)), "--nproc", "2", *flags(settings)]
    with started(arguments) as process:
        _wait_for_steps(run, process)
        said: list[str] = []
        profile_run(run, what="torch", num_steps=2, ranks=None, name="both", say=said.append)
        assert said[0].startswith("asked 2 ranks for torch of steps ")
        for rank in range(2):
            with gzip.open(run / "profiles" / "both" / f"rank_{rank:05d}.trace.json.gz") as file:
                trace = json.load(file)
            assert trace["distributedInfo"]["rank"] == rank
            names = {event.get("name") for event in trace["traceEvents"]}
            assert {"aten::mm", "gloo:all_reduce"} <= names
        answers = [answered(run, "both", rank) for rank in range(2)]
        assert answers[0].first_step == answers[1].first_step
        assert answers[0].last_step == answers[1].last_step

        verb = ["profile", str(run), "--what", "spans", "--steps", "3", "--ranks", "1"]
        result = CliRunner().invoke(app, [*verb, "--name", "one"])
        assert result.exit_code == 0, result.exception
        assert "megascale trace" in result.output
        asked = answered(run, "one", 1)
        steps = range(asked.first_step or 0, (asked.last_step or 0) + 1)
        assert len(steps) == 3
        wait_until(lambda: set(steps) <= _steps_with_spans(run, 1), process)
        assert not answer_file(run, "one", 0).exists()

        late = where_is(run).step
        with pytest.raises(LaunchError, match=f"step {late} has begun"):
            profile_run(
                run, what="spans", num_steps=1, ranks=None, first_step=late, say=said.append
            )
        process.send_signal(15)
        code, _, errors = end(process)
    assert code == 0, errors
    with pytest.raises(LaunchError, match="ranks 0, 1 did not answer in 1 s: is the run alive"):
        profile_run(run, what="spans", num_steps=1, ranks=None, timeout_s=1.0, say=said.append)


def _steps_with_spans(run: Path, rank: int) -> set[int | None]:
    return {e.step for e in read_events(line_file(run, rank)) if isinstance(e, Span)}


@pytest.mark.full
def test_a_run_that_ends_inside_of_a_window_ends_as_it_would_have(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*SMALL, *ENDLESS, f"job.run_dir={run}"]
    arguments = ["train", str(write_recipe(tmp_path)), "--nproc", "2", *flags(settings)]
    with started(arguments) as process:
        _wait_for_steps(run, process)
        first = when_it_steps(run).step_ahead()
        write_request(run, Request("cut", "torch", first, 1000))
        wait_until(lambda: where_is(run).step > first + 1, process)
        process.send_signal(15)
        code, _, errors = end(process)
    assert code == 0, errors
    assert "the run ended at step" in answered(run, "cut", 0).why
    assert not (run / "profiles").exists()


def test_profilers_of_a_cpu_name_what_is_not_there(tmp_path: Path) -> None:
    recorder = Recorder(MonotonicClock(), lambda _event: None)
    makers = profilers(tmp_path, recorder, torch.device("cpu"), line_file(tmp_path, 0))
    with pytest.raises(ConfigError, match="ask a run on GPUs"):
        makers["memory"]("x", 1)
