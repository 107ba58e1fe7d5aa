"""A job whose driver died is taken over by the command line that it was started with, or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.decide import begin
from megascale.cluster.driver import start, takeover
from megascale.cluster.driver.journal import Journal
from megascale.cluster.driver.session import Job
from megascale.errors import ConfigError
from tests.cluster.driver.test_program import RECIPE, verb


class Place:
    """A run folder with a job in it; `start` is `megascale run` up to where it would begin."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "driver"
        self.jobs: list[Job] = []
        monkeypatch.setattr(start, "run", self._begin)

    def _begin(self, job: Job) -> int:
        self.jobs.append(job)
        return 0

    def start(self, *overrides: str, recipe: str = RECIPE, **changes: Any) -> None:
        words = [f"job.run_dir={self.run_dir}", *overrides]
        assert verb(recipe, overrides=words, **changes) == 0

    def script(self, *words: str, **changes: Any) -> None:
        assert verb(*words, script=True, run_dir=self.run_dir, **changes) == 0

    def driver_dies(self) -> None:
        """What `session.start` leaves behind."""
        journal = Journal(self.folder / "journal.sqlite")
        journal.begin(begin(self.jobs[-1].policy), 0.0)
        journal.close()
        takeover.remember(self.folder, self.jobs[-1].settings)
        (self.folder / "address.json").write_text(json.dumps({"port": 4711}))

    @property
    def files(self) -> dict[Path, bytes]:
        """Without what SQLite needs to read one."""
        files = [path for path in self.run_dir.rglob("*") if path.is_file()]
        return {p: p.read_bytes() for p in files if not p.name.endswith(("-wal", "-shm"))}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path / "run", monkeypatch)


def test_the_same_command_takes_the_job_over(place: Place) -> None:
    place.start("optimizer.lr=0.002")
    place.driver_dies()
    place.start("optimizer.lr=0.002")
    assert len(place.jobs) == 2


def test_the_drivers_own_section_and_spares_may_differ(place: Place) -> None:
    place.start()
    place.driver_dies()
    place.start("cluster.selfcheck=off", spares=1)
    assert len(place.jobs) == 2


@pytest.mark.parametrize(
    ("overrides", "changes", "told"),
    [
        (["optimizer.lr=0.001"], {}, "optimizer.lr: 0.002 then, 0.001 now"),
        ([], {}, "optimizer.lr: 0.002 then, 0.003 now"),
        (["optimizer.lr=0.002", "training.steps=9"], {}, "training.steps: 400 then, 9 now"),
        (
            ["optimizer.lr=0.002"],
            {"backend_options": ["hosts=9"]},
            "--backend-set hosts: 'not set' then, 9 now",
        ),
        (["optimizer.lr=0.002"], {"host": "0.0.0.0"}, "--host: '127.0.0.1' then, '0.0.0.0' now"),
        (["optimizer.lr=0.002"], {"port": 4712}, "--port: 4711 then, 4712 now"),
    ],
)
def test_another_start_is_refused_with_what_differs_and_nothing_is_touched(
    place: Place, overrides: list[str], changes: dict[str, Any], told: str
) -> None:
    place.start("optimizer.lr=0.002")
    place.driver_dies()
    before = place.files
    with pytest.raises(ConfigError, match="was started otherwise") as refused:
        place.start(*overrides, **changes)
    message = str(refused.value)
    assert f"  {told}" in message
    assert message.count(" then, ") == 1, message
    assert "take it over with the command line" in message
    assert place.files == before


def test_how_to_change_it_while_it_runs_is_said(place: Place) -> None:
    place.start()
    place.driver_dies()
    with pytest.raises(ConfigError) as refused:
        place.start("optimizer.lr=0.25")
    assert '{"overrides": ["optimizer.lr=0.25"]}' in str(refused.value)


@pytest.mark.parametrize(
    ("others", "hint"),
    [
        ((), ""),
        (("optimizer.lr=0.25", "model.hidden_dropout=0.5"), "model.hidden_dropout=0.5"),
    ],
)
def test_no_update_is_advised_that_would_be_refused(
    place: Place, others: tuple[str, ...], hint: str
) -> None:
    place.start()
    place.driver_dies()
    with pytest.raises(ConfigError) as refused:
        place.start("model.hidden_size=256", "training.seed=9", *others)
    advice = str(refused.value).partition("\ntake it over")[2]
    assert "hidden_size" not in advice
    assert "seed" not in advice
    assert ("/v1/update" in advice) is bool(hint)
    assert hint in advice


def test_a_recipe_that_was_edited_is_another_one(place: Place, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(Path(RECIPE).read_text())
    place.start(recipe=str(recipe))
    place.driver_dies()
    recipe.write_text(recipe.read_text().replace("hidden_size = 128", "hidden_size = 256"))
    with pytest.raises(ConfigError, match="hidden_size: 128 then, 256 now"):
        place.start(recipe=str(recipe))


def test_another_backend_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.cluster.backends.slurm_commands.check_here", lambda: None)
    place.start()
    place.driver_dies()
    with pytest.raises(ConfigError, match="--backend: 'local' then, 'slurm' now"):
        place.start(backend="slurm")


def test_another_program_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    place.script("train.py", "--lr", "1")
    place.driver_dies()
    Path("train.py").unlink()  # its ranks run on
    place.script("train.py", "--lr", "1")
    with pytest.raises(ConfigError, match=r"program: 'train.py --lr 1' then, 'train.py --lr 2'"):
        place.script("train.py", "--lr", "2")
