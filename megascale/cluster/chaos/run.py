"""A schedule from beginning to end: jobs one after another, then the runs without faults that they
are compared with."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megascale.cluster.backends.namespaces import Namespaces, free_subnet, gateway
from megascale.cluster.chaos import report
from megascale.cluster.chaos.course import Course, Done, Say
from megascale.cluster.chaos.faults import KINDS, missing
from megascale.cluster.chaos.judge import Line
from megascale.cluster.chaos.live import JobSpec, LiveJob
from megascale.cluster.chaos.reference import run_reference
from megascale.cluster.chaos.schedule import JobPlan, Schedule, load_schedule
from megascale.cluster.chaos.verify import verify
from megascale.config import load_config
from megascale.errors import LaunchError


def chaos(
    schedule_file: Path,
    recipe: Path,
    overrides: list[str],
    *,
    folder: Path,
    compare: bool = True,
    say: Say = print,
) -> report.Result:
    """The verb. Raises MegascaleError with what the user should read, before anything starts."""
    schedule = load_schedule(schedule_file)
    for plan in schedule.jobs:
        config = load_config(recipe, [*plan.overrides, *overrides])
        config.mesh(schedule.job.nodes * schedule.job.procs_per_node)
    if folder.exists():
        raise LaunchError(f"{folder} exists; chaos starts in a new folder: --run-dir ANOTHER")
    try:
        with _interruptible():
            return _run(schedule, recipe, overrides, folder, compare=compare, say=say)
    except KeyboardInterrupt as signal_:
        raise LaunchError(f"ended by {signal_}; what was started is ended too") from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Signals that end programs become an exception: everything is undone on the way out."""

    def end(signum: int, _frame: FrameType | None) -> None:
        for signal_ in old:
            signal.signal(signal_, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(signum).name)

    old = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _run(
    schedule: Schedule,
    recipe: Path,
    overrides: list[str],
    folder: Path,
    *,
    compare: bool,
    say: Say,
) -> report.Result:
    done = [
        _job(schedule, plan, recipe, tuple(overrides), folder / f"job-{number}", say)
        for number, plan in enumerate(schedule.jobs, 1)
    ]
    references: dict[tuple[str, ...], Path] = {}
    for settings, newest in _needed(done).items() if compare else ():
        say(f"the same {newest} steps without faults ({' '.join(settings[-2:])})")
        where = folder / f"reference-{len(references) + 1}"
        world_size = schedule.job.nodes * schedule.job.procs_per_node
        words = (*settings, *overrides)
        references[settings] = run_reference(recipe, words, where, world_size, newest)
    for one in done:
        if one.newest_step:
            reference = references.get(one.plan.overrides)
            one.checks = verify(one.folder, reference, spoilt=spoilt(one.lines), ports=one.ports)
    jobs = [
        report.JobResult(str(one.folder), one.lines, one.checks, one.ettr, one.newest_step)
        for one in done
    ]
    return report.Result(schedule.name, jobs)


def spoilt(lines: Sequence[Line]) -> set[int]:
    """Steps that faults had computed wrong: from each such fault on, as many as were done again."""
    return {
        step
        for line in lines
        if line.step is not None and KINDS[line.kind].values
        for step in range(line.step, line.step + max(1, line.lost_steps or 0))
    }


def _needed(done: list[Done]) -> dict[tuple[str, ...], int]:
    """Overrides of the jobs that trained: the newest step that any of them reached."""
    found: dict[tuple[str, ...], int] = {}
    for one in done:
        if one.newest_step:
            key = one.plan.overrides
            found[key] = max(found.get(key, 0), one.newest_step)
    return found


# ---------------------------------------------------------------- one job


def _job(
    schedule: Schedule,
    plan: JobPlan,
    recipe: Path,
    overrides: tuple[str, ...],
    folder: Path,
    say: Say,
) -> Done:
    lacking = {fault.number: missing(fault.kind) for fault in plan.faults}
    todo = [fault for fault in plan.faults if not lacking[fault.number]]
    done = Done(plan, folder)
    for fault in plan.faults:
        if lacking[fault.number]:
            why = f"this machine lacks {lacking[fault.number]}"
            say(f"fault {fault.number} {fault.kind}: left out, {why}")
            done.lines.append(Line(fault.number, fault.kind, "", 0.0, skipped=why))
    if not todo:
        return done
    with _network(plan.namespaces) as subnet:
        job = schedule.job
        spec = JobSpec(
            recipe.absolute(),
            (*plan.overrides, *overrides),
            folder.absolute(),
            job.nodes,
            job.procs_per_node,
            job.spares,
            subnet,
            job.step_s,
            schedule.seed,
        )
        live = LiveJob(spec)
        try:
            Course(schedule, live, say).run(todo, done)
        finally:
            live.undo_all()
            live.end_by_force()
    return done


@contextmanager
def _network(wanted: bool) -> Iterator[str | None]:
    """A bridge for namespaces, which the driver can listen on; removed with what hangs on it."""
    if not wanted:
        yield None
        return
    subnet = free_subnet()
    net = Namespaces(subnet, f"http://{gateway(subnet)}:1")
    net.open()
    try:
        yield subnet
    finally:
        net.close()
