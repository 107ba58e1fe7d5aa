"""What came of a command, as an event."""

from __future__ import annotations

from megascale.cluster.job import JobState
from megascale.cluster.messages import Command, Order, Result
from megascale.cluster.transitions import CheckDone, CommandDone, CommandFailed, Event


def event_of(result: Result, command: Command, job: JobState) -> Event | tuple[Order] | None:
    """The event; an order that is to be given again; or None for what nobody waits for.

    A self-check that an agent refused because its epoch passed on the way is asked for again.
    """
    kind = command.order.kind
    if kind == "selfcheck":
        if not result.ok and not result.detail and result.epoch < job.epoch:
            return (command.order,)
        return CheckDone(result.node, result.ok, _failures(result), result.detail)
    if kind in ("dump", "leave"):
        return None
    if result.ok:
        return CommandDone(result.node, kind, result.epoch)
    return CommandFailed(result.node, kind, result.epoch, result.reason)


def _failures(result: Result) -> tuple[str, ...]:
    """The checks that failed, each with its reason, as a self-check reports them."""
    if result.ok:
        return ()
    checks = result.detail.get("checks")
    told = [
        f"{check.get('name')}: {check.get('reason') or 'failed'}"[:500]
        for check in (checks if isinstance(checks, list) else ())
        if isinstance(check, dict) and check.get("ok") is False
    ]
    return tuple(told[:16]) or (result.reason or "failed",)
