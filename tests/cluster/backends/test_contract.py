"""One contract for all backends. Processes are watched from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from megascale.cluster.backends.base import Backend, BackendError, FencedError, Machine
from tests.cluster.backends.harness import TOKEN, Harness, lives, wait_for, wait_until


@contextmanager
def given(place: Harness, count: int) -> Iterator[tuple[Backend, list[Machine]]]:
    backend = place.backend()
    machines = backend.allocate(count)
    for machine in machines:
        place.said(machine.name)
    try:
        yield backend, machines
    finally:
        place.backend().close()  # as a driver does that only ends a job
    assert place.running() == set()
    assert place.leftovers() == []


def names(machines: list[Machine]) -> set[str]:
    return {machine.name for machine in machines}


def hosts(machines: list[Machine]) -> set[str]:
    return {machine.host for machine in machines}


def test_allocate_starts_an_agent_a_machine_on_hosts_of_their_own(place: Harness) -> None:
    with given(place, 3) as (_, machines):
        assert len(names(machines)) == len(hosts(machines)) == 3
        assert place.running() == names(machines)
        for machine in machines:
            said = place.said(machine.name)
            assert said["token"] == TOKEN
            assert said["driver"] == place.start.driver_url
            assert said["host"] == machine.host
            assert said["switch"] in (machine.switch, None), "a pod cannot know its node's labels"
            assert re.fullmatch(r"[\w.:@/+-]+", machine.name), "a legal name of a message"


def test_allocate_takes_no_excluded_host(place: Harness) -> None:
    with given(place, 3) as (first, machines):
        out = sorted(hosts(machines))[:2]
        first.close()
        again = first.allocate(place.hosts - 2, exclude=out)
        assert hosts(again).isdisjoint(out)
        assert len(hosts(again)) == place.hosts - 2


def test_allocate_is_all_or_none(place: Harness) -> None:
    backend = place.backend()
    with pytest.raises(BackendError, match=rf"{place.hosts + 1} machines were asked for"):
        backend.allocate(place.hosts + 1)
    assert place.running() == set()
    backend.close()


def test_evict_ends_the_agent_and_all_it_started_and_nobody_else(place: Harness) -> None:
    with given(place, 3) as (backend, machines):
        gone, *others = machines
        said = place.said(gone.name)
        backend.evict(gone.name, "a test", block=False)
        assert not lives(said["pid"])
        assert not lives(said["child"]), "a child in a session of its own goes too"
        assert place.running() == names(others)
        backend.evict(gone.name, "a test", block=False)
        assert backend.watch() == [], "an eviction that was asked for is no event"
        with pytest.raises(BackendError, match="no machine 'nobody' was given"):
            backend.evict("nobody", "a test", block=False)


def test_a_blocked_host_is_not_given_again_and_another_is_under_a_new_name(place: Harness) -> None:
    with given(place, place.hosts) as (backend, machines):
        bad, fine = machines[0], machines[1]
        backend.evict(bad.name, "bad memory", block=True)
        backend.evict(fine.name, "a slow step", block=False)
        more = backend.replenish(2)
        assert hosts(more) == {fine.host}
        assert names(more).isdisjoint(names(machines)), "a name is given once"

        after = place.backend()
        kept = after.adopt([*machines, *more])
        assert bad.name not in names(kept)
        assert after.replenish(1) == [], "blocked by the driver before"
        after.evict(more[0].name, "late", block=False)
        after.evict(more[0].name, "told again, with block", block=True)
        assert after.replenish(1) == []


def test_replenish_gives_what_there_is(place: Harness) -> None:
    with given(place, 4) as (backend, machines):
        first = backend.replenish(1)
        second = backend.replenish(5)
        assert (len(first), len(second)) == (1, 1)
        assert backend.replenish(1) == []
        everybody = machines + first + second
        assert len(hosts(everybody)) == place.hosts
        wait_until(lambda: place.running() == names(everybody), "the new agents")


def test_replenish_takes_no_excluded_host_and_prefers_a_near_one(place: Harness) -> None:
    with given(place, 1) as (backend, machines):
        here = machines[0].switch
        assert here is not None
        (near,) = backend.replenish(1, near=[machines[0].name])
        assert near.switch == here
        backend.evict(near.name, "a test", block=False)
        everywhere = backend.replenish(place.hosts)
        away = next(m for m in everywhere if m.switch != here)
        for machine in everywhere:
            backend.evict(machine.name, "a test", block=False)
        (by_switch,) = backend.replenish(1, near=[str(away.switch)])
        assert by_switch.switch == away.switch
        (other,) = backend.replenish(1, near=[str(away.switch)], exclude=[away.host])
        assert other.switch == away.switch
        assert other.host != away.host
        far = backend.replenish(2, near=[str(away.switch)], exclude=[away.host])
        assert len(far) == 2, "near is a wish, not a condition"
        assert away.host not in hosts(far)


def test_watch_tells_once_of_an_agent_that_ended(place: Harness) -> None:
    with given(place, 2) as (backend, machines):
        lost, kept = machines
        assert backend.watch() == []
        place.kill(lost)
        seen = wait_for(backend.watch, "the event")
        assert [(event.name, event.kind) for event in seen] == [(lost.name, "gone")]
        assert seen[0].reason
        wait_until(lambda: place.running() == {kept.name}, "its child to go")
        assert backend.watch() == []
        backend.evict(lost.name, "bad memory", block=True)
        assert lost.host not in hosts(backend.replenish(place.hosts))


def test_adopt_after_the_driver_was_killed(place: Harness) -> None:
    start = asdict(place.start)
    told = {"name": place.name, "start": start, "options": place.options, "count": 3}
    command = [sys.executable, "-m", "tests.cluster.backends.driver_process", json.dumps(told)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        machines = [Machine(**values) for values in json.loads(driver.stdout.readline())]
        pids = {m.name: place.said(m.name)["pid"] for m in machines}
        driver.kill()
    lost, stray, kept = machines
    place.kill(lost)
    wait_until(lambda: not lives(pids[lost.name]), "the killed agent")
    never = Machine("never", "given", handle="1:1")

    after = place.backend()
    try:
        wait_until(lambda: after.adopt([lost, kept, never]) == [kept], "its loss to be known")
        assert place.running() == {kept.name}, f"{stray.name} was not adopted, so it is ended"
        assert lives(pids[kept.name]), "the very agent, not another"
        assert after.watch() == []
        assert len(after.replenish(place.hosts)) == place.hosts - 1
    finally:
        after.close()
    assert place.running() == set()


def test_a_backend_of_an_older_driver_is_fenced(place: Harness) -> None:
    with given(place, 2) as (stale, machines):
        kept = place.backend().adopt(machines)
        assert kept == machines
        for forbidden in (
            lambda: stale.evict(machines[0].name, "late", block=True),
            lambda: stale.allocate(1),
            lambda: stale.replenish(1),
            lambda: stale.adopt(machines),
            stale.watch,
            stale.close,
        ):
            with pytest.raises(FencedError, match="another driver took the machines"):
                forbidden()
        assert place.running() == names(machines)
        assert len(place.backend().adopt(machines)) == 2, "no block was written either"


def test_close_gives_everything_back_and_may_be_called_twice(place: Harness) -> None:
    with given(place, 2) as (backend, _):
        backend.replenish(1)
        backend.close()
        assert place.running() == set()
        assert place.leftovers() == []
        backend.close()
        assert backend.watch() == []
        assert len(backend.allocate(place.hosts)) == place.hosts
