"""A rank that was warm before it knew its number does what one that started anew does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megascale.env import free_port
from tests.train.command import SMALL, flags, write_recipe

pytestmark = pytest.mark.full
PAGE = "MEGASCALE_PROGRESS_PAGE"
EARLY = {**os.environ, "OMP_NUM_THREADS": "1", PAGE: "of-nobody".ljust(2048, "/")}
WARM = [sys.executable, "-m", "megascale.train.warm"]
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def _cold(arguments: list[str], environment: Mapping[str, str], log: Path) -> int:
    with log.open("wb") as output:
        return subprocess.run(
            [sys.executable, "-m", "megascale", *arguments],
            env={**EARLY, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        ).returncode


def _start_warm(folder: Path) -> subprocess.Popen[bytes]:
    """One that has said that it is ready."""
    theirs, ours = os.pipe()
    with (folder / "before.log").open("wb") as output:
        process = subprocess.Popen(
            [*WARM, str(ours), "0"],
            env=EARLY,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(ours,),
        )
    os.close(ours)
    assert os.read(theirs, 1) == b"r", (folder / "before.log").read_text()
    os.close(theirs)
    return process


def _tell(
    process: subprocess.Popen[bytes],
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
) -> None:
    assert process.stdin is not None
    order = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.close()


def _warm(arguments: list[str], environment: Mapping[str, str], log: Path) -> int:
    process = _start_warm(log.parent)
    _tell(process, arguments, environment, log)
    return process.wait(90)


def _train(run: Path, *settings: str) -> list[str]:
    given = [*SMALL, "training.steps=2", f"job.run_dir={run}", *settings]
    return ["train", str(write_recipe(run.parent)), *flags(given)]


def test_a_warm_start_and_a_cold_one_train_the_same(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_bytes(bytes(64))
    found = []
    for start in (_cold, _warm):
        run = tmp_path / start.__name__
        environment = {**RANK, PAGE: str(page), "MEGASCALE_EPOCH": "3"}
        log = tmp_path / f"{start.__name__}.log"
        assert start(_train(run), environment, log) == 0, log.read_text()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        words = [line.split("memory:")[0] for line in log.read_text().splitlines()]
        header = json.loads((run / "telemetry" / "rank_00000.jsonl").read_text().split("\n")[0])
        values = [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
        found.append((values, words, header["epoch"], (run / "config.json").stat().st_size))
    cold, warm = found
    assert len(cold[0]) == 2
    assert warm[:3] == cold[:3]
    assert not (tmp_path / "before.log").read_text()


def test_failures_have_the_same_codes_and_files(tmp_path: Path) -> None:
    """A recipe that is refused, and a rank whose peer never comes."""
    alone = {**RANK, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), PAGE: "none"}
    run = tmp_path / "run"
    waiting = _train(run, "comm.init_timeout_s=1")
    for code, arguments in ((2, _train(run, "model.num_layers=0")), (5, waiting)):
        found = []
        for start in (_cold, _warm):
            log = tmp_path / f"{start.__name__}.log"
            log.unlink(missing_ok=True)
            assert start(arguments, {**alone, "MEGASCALE_EPOCH": "1"}, log) == code, log.read_text()
            errors = sorted(run.glob("logs/error-rank*.json"))
            entries = [json.loads(file.read_text()) for file in errors]
            told = [(entry["message"].split("(gloo)")[0], entry["exit_code"]) for entry in entries]
            said = log.read_text().partition("error: ")[2].split("(gloo)")[0]
            found.append((said, told))
            for file in errors:
                file.unlink()
        assert found[0] == found[1]
        assert found[0][0]
        assert len(found[0][1]) == (code == 5)


def test_nothing_is_decided_before_the_order() -> None:
    """No thread, no handler, no device that was asked for or begun; a build with CUDA as well."""
    code = """
import logging, os, torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
torch.version.cuda = "13.0"
from megascale.train import warm
warm.import_all(0)
assert not asked, asked
assert os.listdir("/proc/self/task") == [str(os.getpid())]
assert not logging.root.handlers
assert not torch.distributed.is_initialized()
import sys
assert "megascale.ops.norm.launch" in sys.modules
assert "nvidia" not in open("/proc/self/maps").read().replace("site-packages/nvidia", "")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=EARLY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_others_see_the_environment_of_the_rank() -> None:
    """In /proc, also of what the rank forks; and as much as there is room for."""
    code = f"""
import os
from megascale.train.warm import show_environment
def seen(pid):
    with open(f"/proc/{{pid}}/environ", "rb") as file:
        return dict(v.split("=", 1) for v in file.read().decode().split("\\0") if "=" in v)
before = seen("self")
new = {{"{PAGE}": "/dev/shm/x/rank00003-e7", "RANK": "3"}}
os.environ.update(new)
assert show_environment("{PAGE}", new)
assert seen("self") == {{**before, **new}}
pid = os.fork()
if pid == 0:
    os._exit(seen("self")["RANK"] != "3")
assert os.waitpid(pid, 0)[1] == 0
assert os.environ["PATH"] == before["PATH"]
assert not show_environment("{PAGE}", {{"{PAGE}": "x" * 5000}})
assert not show_environment("NO_SUCH", new)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=EARLY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_an_order_it_ends(tmp_path: Path) -> None:
    process = _start_warm(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
