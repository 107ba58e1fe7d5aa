"""`megascale profile`: asks a live run for profiles of its next steps, and waits for them.

The first step is as far ahead as ranks need to find the request: they look once a second, the
newest step is known half a second late, and a step or two are under way. Where steps came faster
than they did before, and ranks were past that step, they are asked again further ahead. Ranks that
did not answer by the deadline are named.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megascale.errors import ConfigError, DataError, LaunchError
from megascale.events import Header, Step, parse_line
from megascale.telemetry.requests import (
    Answer,
    Request,
    free_name,
    read_answers,
    write_request,
)
from megascale.telemetry.shown import counted, named

LEAD_S = 3.0
_STEPS_UNDER_WAY = 2
_STEPS_OF_PACE = 33
_ATTEMPTS = 3
_WAIT_S = 120.0  # beyond the steps themselves: starting a profiler, writing its file
_LOOK_INTERVAL_S = 0.2
_FIRST_STEP_S = 10.0  # of patience with a run that has just begun
_TAIL_BYTES = 1 << 20
_MOST_LISTED = 16


class NoStepYetError(DataError):
    """The run has ranks, and none has finished a step."""


@dataclass(frozen=True)
class Moment:
    """Where a live run is: its newest step that was told, what a step takes, its ranks."""

    step: int
    step_s: float
    world_size: int

    def step_ahead(self, lead_s: float = LEAD_S) -> int:
        """The first step that all ranks can begin together when they are asked now."""
        return self.step + _STEPS_UNDER_WAY + 1 + math.ceil(lead_s / max(self.step_s, 1e-6))


def profile_run(
    run_dir: Path,
    *,
    what: str,
    num_steps: int,
    ranks: Sequence[int] | None,
    first_step: int | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Ask, wait, and say where the files lie. LaunchError: a rank refused or did not answer."""
    chosen = name or free_name(run_dir, time.strftime(f"{what}-%Y%m%d-%H%M%S", time.gmtime()))
    lead_s, attempts = LEAD_S, 1 if first_step is not None else _ATTEMPTS
    for attempt in range(1, attempts + 1):
        moment = when_it_steps(run_dir)
        wanted = _wanted(ranks, moment.world_size)
        first = first_step or moment.step_ahead(lead_s)
        asked = None if ranks is None else tuple(wanted)
        this_name = chosen if attempt == 1 else free_name(run_dir, chosen)
        request = Request(this_name, what, first, num_steps, asked)
        limit_s, answers = _ask(run_dir, request, moment, wanted, timeout_s, say)
        late = [rank for rank in sorted(answers) if answers[rank].came_late]
        if not late or attempt == attempts:
            break
        say(f"{named(late)} had begun step {first} before the request was found: asking again")
        lead_s *= 2
    _judge(run_dir, this_name, wanted, answers, limit_s)


def _wanted(ranks: Sequence[int] | None, world_size: int) -> list[int]:
    wanted = list(range(world_size)) if ranks is None else sorted(set(ranks))
    strangers = [rank for rank in wanted if not 0 <= rank < world_size]
    if strangers:
        raise ConfigError(
            f"ranks {strangers} are not of this run, which has ranks 0 to {world_size - 1}"
        )
    return wanted


def _ask(
    run_dir: Path,
    request: Request,
    moment: Moment,
    wanted: Sequence[int],
    timeout_s: float | None,
    say: Callable[[str], object],
) -> tuple[float, dict[int, Answer]]:
    """(seconds that were waited at most, the answers)."""
    write_request(run_dir, request)
    say(
        f"asked {counted(len(wanted), 'rank')} for {request.what} of steps {request.first_step} to "
        f"{request.last_step}; the newest step is {moment.step}, a step takes "
        f"{moment.step_s:.3f} s"
    )
    limit_s = timeout_s or 2 * (request.last_step - moment.step) * moment.step_s + _WAIT_S
    answers = _wait(run_dir, request.name, wanted, limit_s)
    for line in _places(run_dir, request, answers):
        say(line)
    return limit_s, answers


def when_it_steps(run_dir: Path) -> Moment:
    """`where_is`, with patience: steps are in the file a flush later than in the log, of a device a
    step more, and the first one compiles."""
    give_up_s = time.monotonic() + _FIRST_STEP_S
    while True:
        try:
            return where_is(run_dir)
        except NoStepYetError:
            if time.monotonic() >= give_up_s:
                raise
        time.sleep(_LOOK_INTERVAL_S)


def where_is(run_dir: Path) -> Moment:
    """Of the run in `run_dir`, from the end of a rank's file. DataError: it has no step yet."""
    files = sorted((run_dir / "telemetry").glob("rank_*.jsonl"))
    if not files:
        raise DataError(
            f"{run_dir} records nothing (there is no telemetry/rank_*.jsonl); give the folder of a "
            "run that trains with telemetry.enable = true"
        )
    header, steps = None, list[Step]()
    for line in _lines_from_the_end(files[0]):
        if b'"kind":"step"' in line and len(steps) < _STEPS_OF_PACE:
            event = parse_line(line)
            steps += [event] if isinstance(event, Step) else []
        if b'"kind":"header"' in line:
            header = parse_line(line)
            break
    if header is None:
        with files[0].open("rb") as file:
            line = file.readline()
        header = parse_line(line) if line.endswith(b"\n") else None
    if not steps or not isinstance(header, Header):
        raise NoStepYetError(f"{run_dir} has finished no step yet; ask again when it has")
    return Moment(steps[0].step, _pace_s(steps), header.world_size)


def _pace_s(newest_first: Sequence[Step]) -> float:
    """What a step takes, usually: one alone may have waited for a checkpoint, or for nobody."""
    begun_ns = [step.t0_ns for step in newest_first]
    between_ns = [after - before for after, before in itertools.pairwise(begun_ns)]
    return median(between_ns or [newest_first[0].dur_ns]) / 1e9


def _lines_from_the_end(path: Path) -> list[bytes]:
    """The last whole lines of a file that grows, newest first."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        data = file.read()
    lines = data.split(b"\n")[:-1]  # behind the last newline: one that is being written
    return lines[::-1] if size <= _TAIL_BYTES else lines[:0:-1]


def _wait(run_dir: Path, name: str, ranks: Sequence[int], limit_s: float) -> dict[int, Answer]:
    """The answers that are there when all ranks are through, or at the deadline."""
    deadline_s = time.monotonic() + limit_s
    while True:
        answers = read_answers(run_dir, name, ranks)
        through = [answer for answer in answers.values() if answer.state != "accepted"]
        if len(through) == len(ranks) or time.monotonic() >= deadline_s:
            return answers
        time.sleep(_LOOK_INTERVAL_S)


def _places(run_dir: Path, request: Request, answers: dict[int, Answer]) -> list[str]:
    done = [answers[rank] for rank in sorted(answers) if answers[rank].state == "done"]
    lines = [
        f"rank {answer.rank}: {run_dir / answer.path}, steps {answer.first_step} to "
        f"{answer.last_step}"
        for answer in done[:_MOST_LISTED]
        if answer.path is not None
    ]
    if len(done) > _MOST_LISTED:
        lines.append(f"... and {counted(len(done) - _MOST_LISTED, 'rank')} more in the same folder")
    if request.what == "spans" and done:
        lines.append(
            f"draw them: megascale trace {run_dir} -o trace.json.gz --first {request.first_step} "
            f"--last {request.last_step}"
        )
    return lines


def _judge(
    run_dir: Path, name: str, ranks: Sequence[int], answers: dict[int, Answer], limit_s: float
) -> None:
    """LaunchError unless all are done."""
    refused = [answer for answer in answers.values() if answer.state == "refused"]
    unfinished = sorted(rank for rank, answer in answers.items() if answer.state == "accepted")
    silent = [rank for rank in ranks if rank not in answers]
    said = [f"rank {answer.rank}: {answer.why}" for answer in refused[:_MOST_LISTED]]
    if len(refused) > _MOST_LISTED:
        said.append(f"{counted(len(refused) - _MOST_LISTED, 'rank')} more refused")
    if unfinished:
        said.append(f"ranks {_listed(unfinished)} took it and were not through in {limit_s:.0f} s")
    if silent:
        said.append(
            f"ranks {_listed(silent)} did not answer in {limit_s:.0f} s: is the run alive? "
            f"(its newest step: {where_is(run_dir).step})"
        )
    if said:
        raise LaunchError(f"request {name}: " + "; ".join(said))


def _listed(ranks: Sequence[int]) -> str:
    more = ", ..." if len(ranks) > _MOST_LISTED else ""
    return ", ".join(map(str, ranks[:_MOST_LISTED])) + more
