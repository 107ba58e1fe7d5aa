"""The pool of warm processes: with a stand-in for what they run, then under agents."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from megascale.cluster.agent import warm as pool
from megascale.cluster.agent import warm_calm, warm_process, warm_template
from megascale.cluster.agent.ledger import PAGE_VARIABLE
from megascale.cluster.agent.proc import marker_of, read_stat
from megascale.cluster.agent.progress import make_page
from megascale.cluster.agent.rank_process import Deadlines, RankProcess, RankStatus
from megascale.cluster.agent.warm import WarmRanks
from megascale.cluster.agent.warm_template import Forked
from megascale.cluster.messages import RunSelfCheck, StartRanks, StopRanks
from megascale.env import installed_versions
from megascale.events import Issued, ProgressWriter
from tests.cluster.agent.conftest import Ordered, StartAgent, gone_within
from tests.cluster.agent.fake_driver import FakeDriver
from tests.cluster.agent.programs import SLEEPS
from tools.blocks import ROOT

STANDS_IN = """
import os, sys, time
while os.path.exists(__file__ + ".slow"):
    time.sleep(0.01)
try:
    os.write(int(sys.argv[1]), b"r")
except BrokenPipeError:
    pass
line = sys.stdin.readline()
if line:
    with open(__file__ + ".told", "w") as file:
        file.write(line)
    time.sleep(600)
"""
TEMPLATE = """
import os, sys, threading, time
from megascale.train import template, warm
why_not, looks = template.why_not, []
def later():
    looks.append(1)
    if len(looks) > 1 and os.path.exists(__file__ + ".later"):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return why_not()
template.why_not = later
warm.import_all = lambda _: time.sleep(0.2)
template.MORE = sys.argv[2:] = ()
if THREAD:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
template.main()
"""
BASE = {"PATH": os.environ["PATH"], "COLOUR": "red"}


class Pool:
    """A pool whose processes are the stand-in, by a clock that a test moves."""

    def __init__(self, folder: Path, *, forks: bool = False) -> None:
        self.program = folder / "stand_in.py"
        self.program.write_text(STANDS_IN)
        self.changes = 0
        self.taken: list[Any] = []
        self.pages = folder / "pages"
        self.statuses: list[RankStatus] = []
        self.checks = False
        self.warm = WarmRanks(BASE, self.pages, folder, self._changed)
        self.warm._forks = forks
        self.log = folder / "rank.log"

    def _changed(self) -> None:
        self.changes += 1

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.warm.members]

    def tick(self, later_s: float = 0.0) -> list[int]:
        self.warm.tick(time.monotonic() + later_s, self.statuses, checks=self.checks)
        return self.pids

    def until(self, look: Callable[[], Any]) -> None:
        give_up_s = time.monotonic() + 30.0
        while not look():
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
            self.tick()

    @property
    def are_ready(self) -> bool:
        processes = self.warm._warm.values()
        return bool(processes) and all(one.ready is None for one in processes)

    def take(self, local_rank: int = 0, **environment: str) -> int | None:
        """Pid of the process that becomes the rank."""
        self.warm.expect(max(1, local_rank + 1, len(self.pids)))
        wanted = {**BASE, "RANK": "7", PAGE_VARIABLE: "page", **environment}
        taken = self.warm.take(local_rank, wanted, ["train", "x.toml"], self.log)
        if taken is None:
            return None
        os.killpg(taken.pid, 0)  # it leads a group of its own
        self.taken.append(taken.process)
        return taken.pid

    def told(self) -> dict[str, Any]:
        file = Path(f"{self.program}.told")
        self.until(lambda: file.exists() and file.read_text().endswith("\n"))
        found: dict[str, Any] = json.loads(file.read_text())
        return found


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    made = Pool(tmp_path)
    monkeypatch.setattr(warm_process, "PROGRAM", (str(made.program),))
    monkeypatch.setattr(warm_calm, "QUIET_S", 0.0)
    yield made
    for process in made.taken:
        process.kill()
        process.wait()
    made.warm.close()
    assert not made.pids


@pytest.fixture
def forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool with a template that imports nothing; its file is template.py."""
    monkeypatch.setitem(BASE, "PYTHONPATH", str(ROOT))
    made = Pool(tmp_path, forks=True)
    program = tmp_path / "template.py"
    program.write_text(TEMPLATE.replace("THREAD", "False"))
    monkeypatch.setattr(warm_template, "PROGRAM", (str(program),))
    monkeypatch.setattr(warm_process, "PROGRAM", (str(made.program),))
    monkeypatch.setattr(warm_calm, "QUIET_S", 0.0)
    adopts = ctypes.CDLL(None).prctl
    adopts(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield made
    for process in made.taken:
        process.kill()
        process.wait()
    made.warm.close()
    adopts(36, 0, 0, 0, 0)
    assert not made.pids


def _three(one: Pool) -> list[int]:
    """Of two ranks and the self-check, once they are there."""
    one.until(lambda: len(one.warm._warm) == 3)
    return [one.warm._warm[key].pid for key in (0, 1, pool.CHECK)]


def test_forks_of_a_template_are_our_own_and_the_next_are_there_at_once(forking: Pool) -> None:
    one = forking
    one.warm.want("all", 2)
    (template,) = one.pids
    coming = [one.warm.check_is_coming]
    first = _three(one)
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
    second = _three(one)
    assert (second[0], second[2]) == (first[0], first[2])
    assert second[1] not in first
    assert template in one.pids, "one import for all"


def test_a_self_check_is_taken_too(forking: Pool, tmp_path: Path) -> None:
    one = forking
    one.warm.want("all", 2)
    first = _three(one)
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
    first = _three(one)
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
    first = _three(one)
    os.kill(template, signal.SIGKILL)
    one.until(lambda: template not in one.pids)
    one.warm.expect(2)
    taken = one.warm.take(0, {**BASE, PAGE_VARIABLE: "page"}, ["version"], one.log)
    assert taken is not None
    assert taken.process.wait(30.0) == 0
    assert set(one.tick()) == {*first[1:]}, "a pause after what died"
    one.tick(later_s=warm_calm.FIRST_PAUSE_S + 1.0)
    assert _three(one)[1:] == first[1:]


def test_spares_keep_nothing_beside_ranks(forking: Pool, tmp_path: Path) -> None:
    one = forking
    one.warm.want("spares", 2)
    _three(one)
    one.statuses = [_running(tmp_path, 0, time.monotonic())[0]]
    one.until(lambda: not one.pids)


def test_a_ready_one_is_told_who_it_is(one: Pool) -> None:
    one.warm.want("all", 1)
    (pid,) = one.tick()
    member = one.warm.members[0]
    stat = read_stat(pid)
    assert stat is not None
    assert (member.identity, member.session, stat.session) == (stat.identity, pid, pid)
    one.until(lambda: one.are_ready)
    assert marker_of(stat, f"{PAGE_VARIABLE}={one.pages}/".encode()), "its folder marks whose it is"
    assert one.warm.held_bytes > 1 << 20
    assert one.take() == pid
    assert one.told() == {
        "arguments": ["train", "x.toml"],
        "environment": {"RANK": "7", PAGE_VARIABLE: "page"},
        "log": str(one.log),
    }
    assert pid not in one.pids, "it is the rank's from now on"


def test_one_that_still_imports_is_told_too_unless_it_is_late(
    one: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Path(f"{one.program}.slow")
    slow.touch()
    one.warm.want("all", 1)
    (late,) = one.tick()
    monkeypatch.setattr(pool, "READY_S", 0.0)
    assert one.take() is None
    monkeypatch.setattr(pool, "READY_S", 60.0)
    one.until(lambda: late not in one.pids)
    assert not one.tick(), "after a failure there is a pause"
    (pid,) = one.tick(later_s=warm_calm.FIRST_PAUSE_S + 1.0)
    began_s = time.monotonic()
    assert one.take() == pid
    assert time.monotonic() - began_s < 1.0
    slow.unlink()
    assert one.told()["environment"]["RANK"] == "7"


def test_one_that_was_killed_is_not_used(one: Pool) -> None:
    one.warm.want("all", 1)
    (pid,) = one.tick()
    one.until(lambda: one.are_ready)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    changes = one.changes
    assert one.take() is None
    assert one.changes == changes + 1
    assert one.tick(later_s=warm_calm.FIRST_PAUSE_S + 1.0) != [pid]


def test_another_environment_needs_others(one: Pool) -> None:
    one.warm.want("all", 2)
    one.until(lambda: one.tick() and len(one.pids) == 2 and one.are_ready)
    before = set(one.pids)
    assert one.take(1, COLOUR="blue") is None
    one.until(lambda: len(one.pids) == 2 and one.are_ready and not before & {*one.pids})
    assert one.take(0, COLOUR="blue", OMP_NUM_THREADS="3") is None
    one.until(lambda: len(one.pids) == 2 and one.are_ready)
    pid = one.take(0, COLOUR="blue", OMP_NUM_THREADS="3")
    assert pid is not None
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {b"COLOUR=blue", b"OMP_NUM_THREADS=3"} <= {*environ}


def test_new_code_needs_others(one: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    one.warm.want("all", 1)
    one.until(lambda: one.tick() and one.are_ready)
    (old,) = one.pids
    new = frozenset({*warm_process.code_now(), ("new.py", 1, 2)})
    monkeypatch.setattr(pool, "code_now", lambda: new)
    monkeypatch.setattr(warm_process, "code_now", lambda: new)
    assert one.take() is None
    one.until(lambda: old not in one.pids and one.are_ready)
    assert one.take() is not None


def test_the_package_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "inner" / "module.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    monkeypatch.setattr(warm_process, "PACKAGE", tmp_path)
    seen = [warm_process.code_now()]
    (tmp_path / "inner" / "module.pyc").touch()
    assert warm_process.code_now() == seen[0]
    file.write_text("a = 22\n")
    seen.append(warm_process.code_now())
    os.utime(file, (1.0, 1.0))  # an older file in its place
    seen.append(warm_process.code_now())
    (tmp_path / "other.py").touch()
    seen.append(warm_process.code_now())
    assert len({*seen}) == 4


def test_another_program_and_fewer_ranks_need_none(one: Pool) -> None:
    one.warm.want("all", 2)
    one.until(lambda: one.tick() and len(one.pids) == 2 and one.are_ready)
    first = one.warm._warm[0].pid
    one.warm.expect(1)
    one.until(lambda: one.pids == [first])
    one.warm.expect(0)
    one.until(lambda: not one.pids)
    assert not one.tick(later_s=100.0)
    one.warm.want("off", 2)
    assert not one.tick(later_s=200.0)


def _running(folder: Path, rank: int, started_s: float) -> tuple[RankStatus, ProgressWriter]:
    page = folder / f"rank{rank:05d}-e1"
    make_page(page)
    status = RankStatus(
        rank, rank, 1, 1, epoch=1, state="running", started_s=started_s, page=str(page)
    )
    return status, ProgressWriter(page)


def test_the_next_ones_wait_for_the_first_step(one: Pool, tmp_path: Path) -> None:
    now_s = time.monotonic()
    ranks = [_running(tmp_path, rank, now_s) for rank in range(2)]
    one.statuses = [status for status, _ in ranks]
    one.warm.want("all", 2)
    assert not one.tick(), "they start"
    for step in (0, 11):
        for _, page in ranks:
            page.issued(Issued(1, step, "init", 1))
        assert not one.tick(), "they load, or are in their first step"
    ranks[0][1].issued(Issued(1, 12, "forward", 1))
    assert not one.tick(), "one of two is past it"
    ranks[1][1].issued(Issued(1, 13, "forward", 1))
    one.checks = True
    assert not one.tick(), "a self-check beside ranks"
    one.checks = False
    assert len(one.tick()) == 1
    one.warm._at_once = 1
    assert len(one.tick()) == 1, "one import at a time"
    one.until(lambda: len(one.pids) == 2 and one.are_ready)


def test_a_long_first_step_is_not_waited_for_and_spares_alone_are_kept(
    one: Pool, tmp_path: Path
) -> None:
    status, _ = _running(tmp_path, 0, time.monotonic())
    one.statuses = [status]
    one.warm.want("spares", 1)
    assert not one.tick(later_s=warm_calm.REFILL_S + 1.0), "a node with ranks"
    one.warm.want("all", 1)
    assert not one.tick()
    assert len(one.tick(later_s=warm_calm.REFILL_S + 1.0)) == 1
    one.warm.end()
    one.until(lambda: not one.pids)
    one.warm.want("spares", 1)
    one.statuses = [replace(status, state="exited")]
    assert len(one.tick()) == 1


def test_a_self_check_has_the_node_to_itself(one: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_calm, "QUIET_S", 5.0)
    one.warm.want("all", 1)
    assert not one.tick(later_s=4.0), "the driver may want something else next"
    one.checks = True
    assert not one.tick(later_s=10.0)
    one.checks = False
    assert not one.tick(later_s=14.0)
    assert len(one.tick(later_s=16.0)) == 1


@pytest.mark.parametrize(
    ("is_ours", "save", "patience_s"),
    [(True, False, 1.0), (False, False, 5.0), (True, True, 600.0)],
)
def test_a_trainer_that_is_not_to_save_has_a_second(
    is_ours: bool, save: bool, patience_s: float
) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{deaf}; time.sleep(600)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read(1)
    stat = read_stat(process.pid)
    assert stat is not None
    status = RankStatus(0, 0, process.pid, stat.start_ticks, 1, "running", 0.0, is_ours=is_ours)
    rank = RankProcess(status, process)
    rank.ask(0.0, Deadlines(grace_s=5.0), save=save)
    rank.advance(patience_s - 0.1, Deadlines())
    assert not rank.is_ending
    rank.advance(patience_s, Deadlines())
    assert rank.killed_s == patience_s
    assert process.wait(10) == -signal.SIGKILL


# ---------------------------------------------------------------- agents


def _ours(order: StartRanks, *arguments: str, **environment: str) -> StartRanks:
    return order.model_copy(
        update={"program": None, "arguments": list(arguments), "environment": environment}
    )


def _ready(driver: FakeDriver, tmp_path: Path, count: int) -> list[int]:
    """Pids that the agent has called ready."""
    log = tmp_path / "agent-0.log"

    def look() -> list[int]:
        lines = [line for line in log.read_text().splitlines() if "is ready after" in line]
        return [int(line.partition("(pid ")[2].partition(")")[0]) for line in lines]

    driver.wait(lambda: len(look()) >= count, 90.0, f"{count} warm processes")
    return look()


def _want(driver: FakeDriver, mode: str, num_ranks: int) -> None:
    cast("dict[str, Any]", driver.joined).update(warm=mode, procs_per_node=num_ranks)


def _members(tmp_path: Path) -> Mapping[int, int]:
    record = json.loads((tmp_path / "agents" / "n0" / "processes.json").read_text())
    return {member["pid"]: member["rank"] for member in record["members"]}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the package, which nobody edits during the test."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # else the agent's folder, the root, comes first
    folder = tmp_path / "copy"
    shutil.copytree(ROOT / "megascale", folder / "megascale")
    return folder


@pytest.mark.full
def test_a_warm_process_becomes_the_rank_and_another_program_ignores_it(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path, copy: Path
) -> None:
    _want(driver, "all", 1)
    start_agent(path=str(copy))
    (first,) = _ready(driver, tmp_path, 1)
    assert _members(tmp_path)[first] == -1
    started = driver.result_of(driver.order(_ours(ordered(SLEEPS), "train", "/nowhere.toml")))
    assert started.detail["pids"] == {"0": first}
    dead = driver.rank(0, state="exited")
    assert (dead.exit_code, dead.pid) == (2, first)
    log = tmp_path / "logs" / "rank00000.log"
    assert "rank 0 starts in epoch 1\nerror: " in log.read_text()
    assert driver.result_of(driver.order(StopRanks())).ok
    second = _ready(driver, tmp_path, 2)[1]
    driver.epoch = 2
    other = driver.result_of(driver.order(_ours(ordered(SLEEPS), "version", COLOUR="blue")))
    assert other.detail["pids"]["0"] != second
    assert driver.rank(0, state="exited", epoch=2).exit_code == 0
    assert "starts in epoch 2\n0." in log.read_text()
    assert driver.result_of(driver.order(StopRanks())).ok
    third = _ready(driver, tmp_path, 3)[2]
    assert b"COLOUR=blue" in Path(f"/proc/{third}/environ").read_bytes()
    driver.epoch = 3
    assert driver.result_of(driver.order(ordered(SLEEPS))).detail["pids"]["0"] != third
    driver.wait(lambda: read_stat(third) is None, 10.0, "its end: nobody needs it")


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_leaves_no_warm_process(
    signum: int,
    driver: FakeDriver,
    start_agent: StartAgent,
    ordered: Ordered,
    tmp_path: Path,
    copy: Path,
) -> None:
    """Nor a rank that was one, nor what that has forked, wherever it went."""
    forks = tmp_path / "forks.py"
    forks.write_text(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    open(__file__ + '.forked', 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    _want(driver, "all", 1)
    _hook(copy, forks)
    agent = start_agent(path=str(copy))
    (first,) = _ready(driver, tmp_path, 1)
    driver.wait(lambda: _members(tmp_path), 5.0, "the record")
    assert driver.result_of(driver.order(_ours(ordered(SLEEPS), "fork"))).ok
    forked = Path(f"{forks}.forked")
    driver.wait(lambda: forked.exists() and forked.read_text(), 30.0, "the fork")
    pid = int(forked.read_text())
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"/rank00000-e1\0" in environ
    assert b"MEGASCALE_EPOCH=1\0" in environ
    driver.rank(0, pid=first)
    agent.send_signal(signum)
    assert agent.wait(30) == (-signum if signum == signal.SIGKILL else 0)
    gone_within(tmp_path, 10.0)
    stat = read_stat(pid)
    assert stat is None or not stat.is_alive


@pytest.mark.full
def test_the_first_self_check_waits_for_the_template_and_the_next_has_one(
    driver: FakeDriver, start_agent: StartAgent, tmp_path: Path, copy: Path
) -> None:
    """Its answer is that of a check that starts anew, from workers that imported nothing."""
    _want(driver, "all", 1)
    start_agent(path=str(copy))
    log = tmp_path / "agent-0.log"

    def come() -> bool:
        return log.read_text().count("the next self-check") == count

    count = 1
    for _ in range(2):  # taken, and another came
        count += 1
        order = RunSelfCheck(level="light", deadline_s=120.0)
        result = driver.result_of(driver.order(order), timeout_s=100.0)
        assert result.ok, result
        names = [check["name"] for check in result.detail["checks"]]
        assert names == ["host", "gpus", "memory", "gemm", "replay"]
        driver.wait(come, 30.0, "the next")


def _hook(copy: Path, program: Path) -> None:
    """`megascale fork` in a warm process runs `program`."""
    (copy / "sitecustomize.py").write_text(
        "import os, runpy, sys\n"
        "def fork(main):\n"
        "    def run():\n"
        f"        runpy.run_path({str(program)!r}) if sys.argv[1:] == ['fork'] else main()\n"
        "    return run\n"
        "if 'megascale.train.template' in ' '.join(sys.orig_argv):\n"
        "    import megascale.cli\n"
        "    megascale.cli.main = fork(megascale.cli.main)\n"
    )
