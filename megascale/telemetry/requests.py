"""What a live run can be asked for: profiles of some of its next steps (MegaScale 5.1).

A request is a file that ranks find in `RUN/telemetry/requests/`; each rank that is asked answers
with a file in `RUN/telemetry/answers/`, whatever the request is. The folders are apart because
ranks look at the first once a second, and 12,288 answers in it would make each of them list it.

Ranks agree on nothing: the request names a step that has not begun, and each begins there by
itself. A rank that finds the request too late says so and does nothing.

    requests/NAME.json            {"what": "torch", "first_step": 120, "num_steps": 3, "ranks": [0]}
    answers/NAME.rank_00000.json  {"state": "done", "path": "profiles/NAME/...", ...}
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megascale.errors import ConfigError, DataError

WHAT = ("spans", "torch", "memory", "monitor")
BY_NODES = ("monitor",)  # asked of nodes: ranks pass over it

State = Literal["accepted", "done", "refused"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_BEGUN = re.compile(r"step \d+ ha[sd] begun")
_MOST_STEPS = 1000
_KEYS = {"what", "first_step", "num_steps", "ranks"}


@dataclass(frozen=True)
class Request:
    """`num_steps` steps from `first_step` on, of global `ranks`; None: of all."""

    name: str
    what: str
    first_step: int
    num_steps: int
    ranks: tuple[int, ...] | None = None

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_steps - 1

    def is_for(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True)
class Answer:
    """What rank `rank` says. path  of what it wrote, relative to the run's folder."""

    rank: int
    state: State
    why: str = ""
    path: str | None = None
    first_step: int | None = None
    last_step: int | None = None

    @property
    def came_late(self) -> bool:
        """The rank had begun the first step when it found the request."""
        return self.state == "refused" and bool(_BEGUN.match(self.why))


def requests_folder(run_dir: Path) -> Path:
    return run_dir / "telemetry" / "requests"


def answer_file(run_dir: Path, name: str, rank: int) -> Path:
    return run_dir / "telemetry" / "answers" / f"{name}.rank_{rank:05d}.json"


def profile_folder(run_dir: Path, name: str) -> Path:
    return run_dir / "profiles" / name


def free_name(run_dir: Path, name: str) -> str:
    """`name`, or NAME-2, NAME-3, ... where a request has it already."""
    taken = {path.stem for path in requests_folder(run_dir).glob("*.json")}
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(one for one in names if one not in taken)


def write_request(run_dir: Path, request: Request) -> Path:
    """ConfigError: it is none that a rank would take, or its name is taken."""
    text = json.dumps({key: asdict(request)[key] for key in sorted(_KEYS)}, indent=2) + "\n"
    try:
        parse_request(request.name, text)
    except DataError as error:
        raise ConfigError(str(error)) from None
    folder = requests_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / f"{request.name}.json", folder / f".{request.name}.{os.getpid()}"
    aside.write_text(text)
    try:
        os.link(aside, path)  # unlike a rename, this never takes the place of another request
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already: a request of that name was made; choose another --name"
        ) from None
    finally:
        aside.unlink()
    return path


def parse_request(name: str, text: str) -> Request:
    """The request in a file NAME.json. DataError: what is wrong with it."""
    if not _NAME.fullmatch(name):
        raise DataError(
            f"a request is called {name!r}; legal: letters, digits, '_', '.' and '-', at most 100"
        )
    try:
        record = json.loads(text)
    except ValueError as error:
        raise DataError(f"request {name} is no JSON ({error})") from None
    if not isinstance(record, dict) or not {"what", "first_step"} <= record.keys() <= _KEYS:
        raise DataError(
            f"request {name} must be an object with what and first_step, and may have num_steps "
            f"and ranks; got {text[:120]!r}"
        )
    if record["what"] not in WHAT:
        raise DataError(f"request {name} asks for {record['what']!r}; legal: {', '.join(WHAT)}")
    steps = record["first_step"], record.get("num_steps", 1)
    if not all(type(step) is int and step >= 1 for step in steps) or steps[1] > _MOST_STEPS:
        raise DataError(
            f"request {name} is for {steps[1]!r} steps from step {steps[0]!r}; legal: whole "
            f"numbers from 1, at most {_MOST_STEPS} steps"
        )
    return Request(name, record["what"], *steps, _ranks(name, record.get("ranks")))


def _ranks(name: str, ranks: Any) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    if not isinstance(ranks, list) or not ranks or not all(type(r) is int for r in ranks):
        raise DataError(f"request {name} is for ranks {ranks!r}; legal: a list of ranks, or null")
    return tuple(sorted(set(ranks)))


def write_answer(run_dir: Path, name: str, answer: Answer) -> None:
    """In place of an earlier one of this rank. OSError where the folder cannot be written."""
    path = answer_file(run_dir, name, answer.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    known = {key: value for key, value in asdict(answer).items() if value not in (None, "")}
    aside.write_text(json.dumps(known) + "\n")
    aside.replace(path)


def read_answer(run_dir: Path, name: str, rank: int) -> Answer | None:
    """None where there is none yet."""
    try:
        return Answer(**json.loads(answer_file(run_dir, name, rank).read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{answer_file(run_dir, name, rank)} is no answer ({error})") from None


def read_answers(run_dir: Path, name: str, ranks: Sequence[int]) -> dict[int, Answer]:
    """By rank, those that are there. One listing: most of 12,288 ranks answer at once."""
    folder, found = answer_file(run_dir, name, 0).parent, {}
    try:
        there = {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        return {}
    for rank in ranks:
        if answer_file(run_dir, name, rank).name in there:
            answer = read_answer(run_dir, name, rank)
            if answer is not None:
                found[rank] = answer
    return found
