"""What people, the dashboard and tests ask of a driver, and are answered. Version 1.

    GET  /v1/status                -> Status
    POST /v1/evict   EvictRequest  -> Accepted
    POST /v1/update  UpdateRequest -> Accepted
    POST /v1/stop                  -> Accepted

Rules and bounds are those of `messages.py`.
"""

from __future__ import annotations

from pydantic import Field

from megascale.cluster.messages import Count, Message, Name, Seconds, Text


class EvictRequest(Message):
    node: Name
    reason: Text
    block: bool = True


class UpdateRequest(Message):
    """Hot update: the next epoch starts with these overrides (and code as it is on disk then)."""

    overrides: list[Text] = Field(default_factory=list, max_length=64)
    reason: Text = ""


class Accepted(Message):
    """What was asked for will be decided next; `/v1/status` shows what came of it."""

    epoch: Count


class NodeStatus(Message):
    """ranks: of this node, the first and the last; None for a spare."""

    node: Name
    state: Name
    host: str
    switch: str | None = None
    node_rank: Count | None = None
    ranks: tuple[Count, Count] | None = None
    silence_s: Seconds


class IncidentStatus(Message):
    """An open one. opened_s: of the job's clock."""

    number: Count
    cause: str
    opened_s: Seconds
    nodes: list[str] = Field(default_factory=list)
    ranks: list[Count] = Field(default_factory=list)
    step: Count | None = None
    text: str = ""


class ReadoptedStatus(Message):
    """Agents of the driver before: which came to this one within `seconds`, which did not."""

    agents: list[str]
    missing: list[str] = Field(default_factory=list)
    seconds: Seconds


class Status(Message):
    """The job at a glance.

    phase     as `cluster/job.py` names them
    job_s     since the job's start, over restarts of the driver
    ledger_s  where that time went, by kind (`cluster/ledger.py`); booked up to the last transition
    ettr      useful share of it
    refused   requests that were refused, by kind
    drivers   that the job has had; `readopted`: by the present one, None until that is known
    """

    phase: Name
    epoch: Count
    run_dir: str
    job_s: Seconds
    newest_step: Count
    epoch_step: Count | None = None
    world_size: Count
    nodes: list[NodeStatus]
    incidents: list[IncidentStatus]
    restarts: dict[str, Count]
    blocked: list[str]
    ledger_s: dict[str, Seconds]
    ettr: float | None = None
    refused: dict[str, Count]
    drivers: Count = 1
    readopted: ReadoptedStatus | None = None
    report: str = ""
