"""Workers that are forks of their caller: bounded, told and collected as new interpreters are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.selfcheck.alive import gone
from tools.blocks import ROOT

CALLER = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from megascale.cluster.selfcheck import forked
from megascale.cluster.selfcheck.process import Job, run_in_turn
import tests.cluster.selfcheck.worker
MARK = object()
forked.allow()
{before}
jobs = [Job(name, arguments, limit_s) for name, limit_s, arguments in json.loads(sys.argv[1])]
os.environ["WHOSE"] = "the caller's"
changes = {{"WHOSE": "the worker's"}}
got = run_in_turn({module!r}, jobs, time.monotonic() + 60.0, changes)
try:
    os.waitpid(-1, os.WNOHANG)
    left = True
except ChildProcessError:
    left = False
print(json.dumps([{{name: vars(o) for name, o in got.items()}}, left, os.environ["WHOSE"]]))
"""
WORKER = "tests.cluster.selfcheck.worker"


def _call(jobs: list[Any], module: str = WORKER, before: str = "") -> dict[str, Any]:
    code = CALLER.format(root=str(ROOT), module=module, before=before)
    said = subprocess.run(
        [sys.executable, "-c", code, json.dumps(jobs)],
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
        cwd=ROOT,
    ).stdout
    outcomes, left, whose = json.loads(said.splitlines()[-1])
    assert not left, "each worker was collected"
    assert whose == "the caller's"
    return dict(outcomes)


def test_results_errors_deaths_and_hangs(tmp_path: Path) -> None:
    child = tmp_path / "child"
    got = _call(
        [
            ["a", 20.0, {"noise_bytes": 300_000}],
            ["b", 20.0, {"error": "ValueError: wrong"}],
            ["c", 20.0, {"exit": 3, "at": "the driver"}],
            ["d", 2.0, {"sleep_s": 600.0, "child": str(child)}],
            ["e", 20.0, {}],
        ]
    )
    assert got["a"]["result"]["pid"]
    assert (got["b"]["kind"], got["b"]["reason"]) == ("error", "ValueError: wrong")
    assert got["c"]["reason"] == "its process exited 3: no such device (at the driver)"
    assert got["d"]["kind"] == "hung"
    assert gone(int(child.read_text()))
    assert got["e"]["result"]["pid"] != got["a"]["result"]["pid"]


def test_it_is_a_fork_with_the_changes_and_what_it_raises_is_told(tmp_path: Path) -> None:
    """`__main__` of the caller is what no new interpreter has."""
    (tmp_path / "shows.py").write_text(
        "import json, os, sys\n"
        "assert hasattr(sys.modules['megascale.cluster.selfcheck.forked'], '_allowed')\n"
        "if len(sys.argv) > 3:\n"
        "    raise KeyError('broken')\n"
        "print(json.dumps({'workload': 'a', 'result': {'whose': os.environ['WHOSE'],\n"
        "    'nvls': os.environ['NCCL_NVLS_ENABLE'], 'leads': os.getsid(0) == os.getpid()}}))\n"
    )
    here = f"sys.path.insert(0, {str(tmp_path)!r})"
    got = _call([["a", 20.0, {}]], "shows", here)
    assert got["a"]["result"] == {"whose": "the worker's", "nvls": "0", "leads": True}
    got = _call([["a", 20.0, {}], ["b", 20.0, {}]], "shows", here)
    assert got["a"]["reason"] == "its process exited 1: KeyError: 'broken' (at its start)"


def test_a_worker_whose_output_nobody_reads_does_not_go_on_as_its_caller(tmp_path: Path) -> None:
    who = tmp_path / "who"
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from megascale.cluster.selfcheck import forked
forked.allow()
work = ["timeit", "-n1", "-r1", "import time; time.sleep(1.0)"]  # it prints at its end
try:
    worker = forked.start([sys.executable, "-m", *work], {{}})
finally:  # what a caller tidies up is not the worker's
    open({str(who)!r}, "a").write(f"{{os.getpid()}} ")
worker.stdout.close()
worker.stderr.close()
worker.wait()
print(os.getpid())
"""
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=buffered,
    ).stdout
    assert who.read_text().split() == said.split()


def test_a_caller_with_threads_starts_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(
        "import json, sys\n"
        "known = 'megascale.cluster.selfcheck.forked' in sys.modules\n"
        "print(json.dumps({'workload': 'a', 'result': {'is_fork': known}}))\n"
    )
    here = f"sys.path.insert(0, {str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
    assert _call([["a", 20.0, {}]], "shows", here)["a"]["result"] == {"is_fork": True}
    thread = (
        "import threading; threading.Thread(target=time.sleep, args=(90,), daemon=True).start()"
    )
    assert _call([["a", 20.0, {}]], "shows", here + thread)["a"]["result"] == {"is_fork": False}


def _run(code: str, *, path: Path | None = None) -> str:
    more = {} if path is None else {"PYTHONPATH": str(path)}
    head = (
        "import os, signal, sys\nfrom megascale.cluster.selfcheck import forked\nforked.allow()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **more},
    )
    return done.stdout.strip()


def test_a_worker_has_no_file_of_its_caller(tmp_path: Path) -> None:
    """Also not one with a large number: a pipe's other end that stays open is never at its end."""
    (tmp_path / "lists.py").write_text("import os\nprint(sorted(os.listdir('/proc/self/fd')))\n")
    code = """
for number in (3, 77, 256, 300):
    os.dup2(1, number)
worker = forked.start([sys.executable, "-m", "lists"], {})
print(worker.stdout.read().decode(), worker.wait())
"""
    said = _run(code, path=tmp_path)
    assert said == "['0', '1', '2', '3']\n 0", "3: of the listing itself"


def test_a_fork_that_fails_leaves_no_pipe() -> None:
    code = """
def fails():
    raise BlockingIOError("too many")
os.fork, before = fails, os.listdir("/proc/self/fd")
try:
    forked.start([sys.executable, "-m", "json"], {})
except BlockingIOError:
    print(os.listdir("/proc/self/fd") == before)
"""
    assert _run(code) == "True"


def test_one_that_somebody_else_collected_did_not_end_well() -> None:
    """As `warm_template.Forked` says: nobody knows how it ended."""
    code = """
worker = forked.start([sys.executable, "-m", "timeit", "-n1", "-r1", "pass"], {})
os.waitpid(worker.pid, 0)
print(worker.wait())
"""
    assert _run(code) == str(-signal.SIGKILL)
