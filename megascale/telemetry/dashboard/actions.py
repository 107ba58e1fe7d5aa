"""What a person may do with the token: ask the ranks of a live run for spans or a profile, and take
a node out of the job."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megascale.telemetry.dashboard.answers import RefusedError
from megascale.telemetry.dashboard.driver import Driver
from megascale.telemetry.dashboard.feeds.readers import ranks_of
from megascale.telemetry.profiling import where_is
from megascale.telemetry.requests import Request, free_name, read_answers, write_request
from megascale.telemetry.shown import counted

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_MOST_PATHS = 16


class RanksRequest(BaseModel):
    """ranks: as in `0,8-15`; None: all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: Literal["spans", "torch", "memory"]
    num_steps: int = Field(ge=1, le=1000)
    ranks: str | None = Field(None, max_length=4096)


class EvictRequest(BaseModel):
    """block: the node does not come back into this job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str = Field(min_length=1, max_length=200)
    reason: str = Field(min_length=1, max_length=300)
    block: bool = True


def request(run_dir: Path, message: RanksRequest) -> Mapping[str, Any]:
    """Leaves the request where the ranks look. DataError: the run has no step yet; RefusedError
    (422): ranks that it has not."""
    ranks, moment = ranks_of(message.ranks), where_is(run_dir)
    if ranks is not None and (not ranks or ranks[-1] >= moment.world_size):
        raise RefusedError(
            422, f"ranks is {message.ranks!r}; this run has ranks 0 to {moment.world_size - 1}"
        )
    first = moment.step_ahead()
    name = free_name(run_dir, time.strftime(f"{message.what}-%Y%m%d-%H%M%S", time.gmtime()))
    asked = Request(name, message.what, first, message.num_steps, ranks)
    write_request(run_dir, asked)
    number = moment.world_size if ranks is None else len(ranks)
    return {
        "name": name,
        "num_ranks": number,
        "first_step": first,
        "last_step": asked.last_step,
        "told": f"{counted(number, 'rank')} asked for {message.what} of steps {first} to "
        f"{asked.last_step}; the newest step is {moment.step}.",
    }


def request_answers(run_dir: Path, name: str) -> Mapping[str, Any]:
    """How many ranks answered, by state, and where the first of their files lie."""
    if not _NAME.fullmatch(name):
        raise RefusedError(422, f"no request is called {name[:60]!r}")
    answers = read_answers(run_dir, name, range(where_is(run_dir).world_size))
    paths = [one.path for one in answers.values() if one.path is not None]
    refused = [f"rank {one.rank}: {one.why}" for one in answers.values() if one.state == "refused"]
    return {
        "states": Counter(one.state for one in answers.values()),
        "paths": paths[:_MOST_PATHS],
        "refused": refused[:_MOST_PATHS],
    }


def evict(driver: Driver, message: EvictRequest) -> Mapping[str, Any]:
    """LaunchError: the driver does not answer; RefusedByDriverError: it will not."""
    accepted = driver.evict(message.node, message.reason, block=message.block)
    epoch = accepted.get("epoch")
    return {
        "epoch": epoch,
        "told": f"The driver has it (epoch {epoch}); what comes of it is in the overview.",
    }
