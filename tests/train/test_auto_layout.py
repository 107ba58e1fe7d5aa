"""`layout = "auto"` in a run: chosen once, stored resolved, kept by a resume, one for all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.config import load_config
from megascale.env import RankEnvironment
from megascale.errors import ConfigError
from megascale.train import auto_layout
from megascale.train.auto_layout import agree_on_layout
from megascale.train.start import start_training
from tests.distributed import run_ranks
from tests.train.command import SMALL, write_recipe

AUTO = [*SMALL, "parallelism.layout=auto", "training.device=cpu"]


def _start(folder: Path, *overrides: str, **options: Any) -> None:
    named: dict[str, Any] = {"nproc": 1, "resume": False, "dry_run": False, "master_port": None}
    run_dir = f"job.run_dir={folder / 'run'}"
    start_training(write_recipe(folder), [*AUTO, run_dir, *overrides], **(named | options))


def test_a_run_stores_its_layout_and_a_resume_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _start(tmp_path, "training.steps=1", "training.micro_batch_size=2")
    told = capsys.readouterr().out
    assert "layout chosen from" in told
    stored = load_config(tmp_path / "run" / "config.json")
    assert stored.parallelism.layout == "given"
    assert stored.training.micro_batch_size == 2
    why = json.loads((tmp_path / "run" / "layout.json").read_text())
    assert why["num_ranks"] == 1
    assert why["layout"]["micro_batch_size"] == 2
    assert why["cluster"] is None
    # the recipe says something else now; what was chosen stays
    _start(tmp_path, "training.steps=2", "training.micro_batch_size=1", resume=True)
    assert "layout kept from the run's start" in capsys.readouterr().out
    assert load_config(tmp_path / "run" / "config.json").training.micro_batch_size == 2
    assert json.loads((tmp_path / "run" / "layout.json").read_text()) == why


def test_a_dry_run_shows_the_choice_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _start(tmp_path, "parallelism.cluster=h200", nproc=4, dry_run=True)
    text = capsys.readouterr().out
    assert '"layout": "given"' in text
    assert "4 ranks\n  tensor parallel" in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("layout chosen from")
    assert "predicted for cluster 'h200'" in last
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_given_layout_shows_its_step_where_a_cluster_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["parallelism.layout=given", "parallelism.tensor_parallel_size=2"]
    _start(tmp_path, *given, nproc=4, dry_run=True)
    assert "predicted for cluster" not in capsys.readouterr().out
    _start(tmp_path, *given, "parallelism.cluster=h200", nproc=4, dry_run=True)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("predicted for cluster 'h200': ")


def test_gpus_whose_name_nobody_knows_need_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set parallelism\.cluster to h200"):
        _start(tmp_path, "training.device=cuda", dry_run=True)


def _agree(rank: int, world_size: int, folder: str, batch: int) -> Any:
    overrides = [f"job.run_dir={folder}", f"training.global_batch_size={batch}"]
    # another recipe on the others: what counts is rank 0's
    overrides.append(f"training.micro_batch_size={1 + rank}")
    config = load_config(None, [*AUTO, *overrides])
    environment = RankEnvironment(rank, world_size, rank, world_size)
    try:
        agreed = agree_on_layout(config, environment, resume=False)
    except ConfigError as error:
        return str(error)
    return agreed.parallelism.model_dump(), agreed.training.micro_batch_size


def test_ranks_that_nobody_of_ours_started_have_rank_0s(tmp_path: Path) -> None:
    first, *others = run_ranks(_agree, 3, str(tmp_path / "run"), 6)
    assert first[0]["layout"] == "given"
    assert all(other == first for other in others)
    assert (tmp_path / "run" / "layout.json").exists()


def test_where_rank_0_finds_none_all_say_so(tmp_path: Path) -> None:
    answers = run_ranks(_agree, 3, str(tmp_path / "run"), 1)
    assert len(set(answers)) == 1
    assert "a batch of 1 sequence fills 3 devices" in answers[0]


def test_an_open_layout_is_told_from_a_given_one() -> None:
    assert auto_layout.is_open(load_config(None, AUTO))
    assert not auto_layout.is_open(load_config(None, SMALL))
