"""Warm processes that a template forks, one that imports nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from megascale.cluster.agent import warm_calm
from megascale.cluster.agent.ledger import PAGE_VARIABLE
from megascale.cluster.agent.proc import marker_of, read_stat
from megascale.cluster.agent.warm_template import Forked
from megascale.env import installed_versions
from tests.cluster.agent.pools import BASE, TEMPLATE, Pool, running, three


def test_forks_of_a_template_are_our_own_and_the_next_are_there_at_once(forking: Pool) -> None:
    one = forking
    one.warm.want("all", 2)
    (template,) = one.pids
    coming = [one.warm.check_is_coming]
    first = three(one)
    coming.append(one.warm.check_is_coming)
    assert coming == [True, False], "a self-check waits for it"
    stat = read_stat(first[1])
    assert stat is not None
    assert (stat.parent, stat.session, stat.group) == (os.getpid(), first[1], first[1])
    assert marker_of(stat, f"{PAGE_VARIABLE}={one.pages}/".encode())
    assert {template, *first} == {*one.pids}, "all are written down"
    one.warm.expect(2)
    environment = {**BASE, "RANK": "7", PAGE_VARIABLE: "page"}
    taken = one.warm.take(1, environment, ["version"], one.log)
    assert taken is not None
    assert taken.pid == first[1]
    assert isinstance(taken.process, Forked)
    assert taken.process.wait(30.0) == 0
    assert one.log.read_text().strip() == installed_versions(["megascale"])["megascale"]
    second = three(one)
    assert (second[0], second[2]) == (first[0], first[2])
    assert second[1] not in first
    assert template in one.pids, "one import for all"


def test_a_self_check_is_taken_too(forking: Pool, tmp_path: Path) -> None:
    one = forking
    one.warm.want("all", 2)
    first = three(one)
    output = tmp_path / "check"
    taken = one.warm.take_check(["light", "1", str(tmp_path)], output)
    assert taken is not None
    assert taken.pid == first[2]
    assert taken.process.wait(30.0) == 0
    assert json.loads(output.read_text())["detail"]["level"] == "light"
    assert one.warm.check_is_coming


def test_a_template_with_a_thread_does_not_fork_and_each_imports_for_itself(
    forking: Pool, tmp_path: Path
) -> None:
    one = forking
    (tmp_path / "template.py").write_text(TEMPLATE.replace("THREAD", "True"))
    one.warm.want("all", 2)
    (template,) = one.pids
    one.until(lambda: one.pids and template not in one.pids)
    one.until(lambda: len(one.pids) == 2 and one.are_ready)
    assert not one.warm.check_is_coming
    assert one.take() is not None
    assert one.told()["environment"]["RANK"] == "7"


def test_a_template_that_has_a_thread_later_forks_no_more_and_no_other_is_begun(
    forking: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """One import of torch after the other was tried and failed, and no rank was warm."""
    one = forking
    one.warm.want("all", 2)
    (template,) = one.pids
    first = three(one)
    Path(f"{one.program.parent}/template.py.later").touch()
    one.warm.expect(2)
    taken = one.warm.take(0, {**BASE, PAGE_VARIABLE: "page"}, ["version"], one.log)
    assert taken is not None
    assert taken.process.wait(30.0) == 0
    one.until(lambda: "the template says it has 2 threads" in caplog.text)
    one.until(lambda: len(one.pids) == 3 and one.are_ready)
    assert template not in one.pids
    assert set(first[1:]) < set(one.pids), "its children stay"
    assert not isinstance(one.warm._warm[0].process, Forked)


def test_children_outlive_their_template_and_another_is_begun(forking: Pool) -> None:
    one = forking
    one.warm.want("all", 2)
    (template,) = one.pids
    first = three(one)
    os.kill(template, signal.SIGKILL)
    one.until(lambda: template not in one.pids)
    one.warm.expect(2)
    taken = one.warm.take(0, {**BASE, PAGE_VARIABLE: "page"}, ["version"], one.log)
    assert taken is not None
    assert taken.process.wait(30.0) == 0
    assert set(one.tick()) == {*first[1:]}, "a pause after what died"
    one.tick(later_s=warm_calm.FIRST_PAUSE_S + 1.0)
    assert three(one)[1:] == first[1:]


def test_spares_keep_nothing_beside_ranks(forking: Pool, tmp_path: Path) -> None:
    one = forking
    one.warm.want("spares", 2)
    three(one)
    one.statuses = [running(tmp_path, 0, time.monotonic())[0]]
    one.until(lambda: not one.pids)
