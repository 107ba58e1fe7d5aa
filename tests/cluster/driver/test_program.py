"""What ranks are started with, what is set aside before, and what is refused at the start."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.actions import Place, StartEpoch
from megascale.cluster.driver import start
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.session import Job
from megascale.cluster.driver.start import _saves_in_memory, run_verb
from megascale.config import load_config
from megascale.errors import ConfigError, LaunchError
from tests.cluster.driver.jobs import ByHand, policy

START = StartEpoch(3, (Place("n1", 0), Place("n0", 1)), resume=True, overrides=("a.b=1",))


def orders(program: Program) -> list[Any]:
    hand = ByHand(policy(2, selfcheck="off"))
    hand.train()
    return program.orders(START, hand.job, 29_500)


def test_a_recipe_resumes_once_its_folder_holds_a_run(tmp_path: Path) -> None:
    program = Program(tmp_path, ("train", "r.toml", "--set", "x.y=0"))
    (first, one), (second, two) = orders(program)
    assert (first, second) == ("n1", "n0")
    assert [(r.rank, r.local_rank) for r in two.ranks] == [(2, 0), (3, 1)]
    assert (one.world_size, one.local_world_size, one.master_port) == (4, 2, 29_500)
    assert one.program is None
    assert one.arguments == ["train", "r.toml", "--set", "x.y=0", "--set", "a.b=1"]
    (tmp_path / "config.json").write_text("{}")
    assert orders(program)[0][1].arguments[-1] == "--resume"


def test_a_script_gets_its_own_arguments_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    order = orders(Program(tmp_path, ("-u", "train.py"), argv=("python",)))[0][1]
    assert (order.program, order.arguments) == (["python"], ["-u", "train.py"])


def checkpoints(run_dir: Path, *steps: int) -> None:
    for number, step in enumerate(steps, 1):
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "COMMITTED").write_text(json.dumps({"number": number}))


def left(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir() if p.name[:4] == "step")


@pytest.mark.parametrize(
    ("back", "newest_step", "kept"),
    [(0, None, [2, 4, 6]), (1, None, [2, 4]), (9, None, [2]), (0, 4, [2, 4]), (0, 1, [2])],
)
def test_newest_checkpoints_are_set_aside_and_one_stays(
    tmp_path: Path,
    back: int,
    newest_step: int | None,
    kept: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints(tmp_path, 2, 4, 6)
    (tmp_path / "checkpoints" / "step-00000008").mkdir()  # interrupted: nobody loads it
    Program(tmp_path, ()).roll_back(back, newest_step)
    assert left(tmp_path) == [f"step-{step:08d}" for step in [*kept, 8]]
    aside = [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith("aside-")]
    assert len(aside) == 3 - len(kept), "nothing is deleted"
    told = "step-00000002 is the oldest that is left, so it is used" in caplog.text
    assert told == (kept == [2])


def test_newest_is_who_was_committed_last(tmp_path: Path) -> None:
    checkpoints(tmp_path, 6, 4)  # rolled back before: step 4 is the newer one
    assert Program(tmp_path, ()).roll_back(1, None) == ["step-00000004"]


def verb(*words: str, **changes: Any) -> int:
    given: dict[str, Any] = {
        "script": False,
        "run_dir": None,
        "overrides": [],
        "backend_options": [],
        "resume": False,
        "nodes": 2,
        "procs_per_node": 2,
        **changes,
    }
    return run_verb(words, **given)


RECIPE = "recipes/first-run.toml"


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        ((), {}, "a recipe is wanted, got nothing"),
        (("a.toml", "b.toml"), {}, "a recipe is wanted"),
        (("no.toml",), {}, "does not exist"),
        ((RECIPE,), {"nodes": 3, "procs_per_node": 1}, "3 ranks cannot hold"),
        ((RECIPE,), {"backend_options": ["hosts"]}, "not KEY=VALUE"),
        ((RECIPE,), {"resume": True}, "holds no run"),
        (("train.py",), {"script": True}, "--run-dir"),
        ((RECIPE,), {"backend": "slurmy"}, "unknown backend 'slurmy'; known: local, slurm, kub"),
        ((RECIPE,), {"backend_options": ["host=1"]}, "local: unknown key 'host'; did you"),
        ((RECIPE,), {"backend_options": ["hosts=0"]}, r"local\.hosts: "),
        ((RECIPE,), {"backend_options": ["hosts=1"]}, "2 nodes on 1 hosts"),
        ((RECIPE,), {"backend": "slurm"}, "sbatch, squeue, sinfo not found"),
        ((RECIPE,), {"backend": "kubernetes"}, r"kubernetes\.image: not set; give --ba"),
        ((RECIPE,), {"host": "192.0.2.1"}, "cannot listen on 192.0.2.1 port 0"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is(
    tmp_path: Path,
    words: tuple[str, ...],
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    changes = {"overrides": [f"job.run_dir={tmp_path}/run"], **changes}
    with pytest.raises((ConfigError, LaunchError), match=message):
        verb(*words, **changes)
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_and_a_script_on_no_backend_are_refused_likewise(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .*in use"):
            verb(RECIPE, overrides=[f"job.run_dir={run_dir}"], port=port)
    with pytest.raises(LaunchError, match="unknown backend"):
        verb("train.py", script=True, run_dir=run_dir, backend="none")
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train.py", "no file train.py in .*give its path"),
        ("trainer", "trainer is no program that can be run"),
        ("./data.txt", "data.txt is no program that can be run"),
    ],
)
def test_a_script_that_is_not_there_is_refused_before_machines_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, told: str
) -> None:
    began: list[Job] = []

    def begin(job: Job) -> int:
        began.append(job)
        return 0

    monkeypatch.setattr(start, "run", begin)
    monkeypatch.chdir(tmp_path)
    Path("data.txt").touch()
    with pytest.raises(ConfigError, match=told):
        verb(word, script=True, run_dir=tmp_path / "run")
    Path("train.py").touch()
    Path("data.txt").chmod(0o755)
    for there in ("train.py", "./data.txt", "true"):
        assert verb(there, script=True, run_dir=tmp_path / "run") == 0
    assert len(began) == 3


def test_a_script_takes_no_other_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only cluster\.\* is legal"):
        verb("train.py", script=True, run_dir=tmp_path / "run", overrides=["optimizer.lr=1"])


def test_a_folder_that_holds_a_run_is_not_started_anew(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds a run"):
        verb(RECIPE, overrides=[f"job.run_dir={tmp_path}"])


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        ([], True),
        (["model.hidden_size=4096", "model.num_layers=32"], False),
        (["checkpoint.memory_interval=0"], False),
        (["checkpoint.memory_interval=5"], False),
        (["checkpoint.enable=false"], False),
    ],
)
def test_small_models_save_in_memory_where_nobody_says_otherwise(
    settings: list[str], saves: bool
) -> None:
    small = ["model.hidden_size=256", "model.num_layers=4"]
    assert _saves_in_memory(load_config(None, [*small, *settings])) is saves
