"""The schedule's file: what it may say, what is refused and how, and that the seed decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cluster.chaos.faults import KINDS
from megascale.cluster.chaos.schedule import Schedule, load_schedule
from megascale.errors import ConfigError
from tools.blocks import ROOT

FILES = sorted((ROOT / "chaos").glob("*.toml"))


def _load(folder: Path, text: str) -> Schedule:
    file = folder / "given.toml"
    file.write_text(text)
    return load_schedule(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_schedules_of_the_repository_are_legal(file: Path) -> None:
    assert load_schedule(file).jobs


def test_the_matrix_has_every_kind_once() -> None:
    jobs = load_schedule(ROOT / "chaos" / "matrix.toml").jobs
    assert sorted(fault.kind for job in jobs for fault in job.faults) == sorted(KINDS)


def test_the_standard_schedule_is_a_fault_every_ten_minutes_for_an_hour() -> None:
    schedule = load_schedule(ROOT / "chaos" / "standard.toml")
    moments = [fault.at_s for job in schedule.jobs for fault in job.faults]
    assert moments == [300.0, 900.0, 1500.0, 2100.0, 2700.0, 3300.0]
    assert schedule.job.duration_s == 3600.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "fault"),
        ("[[fault]]\nkind = 'kil'", "fault.1: unknown fault 'kil'; did you mean 'kill'?"),
        ("[[fault]]\nkind = 'zzzzzz'", "legal: kill, segv"),
        ("[[fault]]\nknid = 'kill'", "unknown key 'knid'; did you mean 'kind'?"),
        ("[[fault]]", "give either kind or any_of"),
        ("[[fault]]\nkind = 'kill'\nany_of = ['segv']", "give either kind or any_of"),
        ("[[fault]]\nkind = 'kill'\nnode = 0", "kill is aimed at a rank, so node is not legal"),
        ("[[fault]]\nkind = 'kill'\nrank = 4", "fault 1: rank 4 of 4; 0 is the first"),
        ("[[fault]]\nkind = 'node_gone'\nnode = 2", "fault 1: node 2 of 2"),
        ("[[fault]]\nkind = 'kill'\nrank = true", "got true"),
        (
            "[[fault]]\nkind = 'exit_code'\noptions = {cod = 3}",
            "exit_code has no option 'cod'; legal: code",
        ),
        ("[[fault]]\nkind = 'kill'\nat_s = 1\nat_step = 1", "exclude each other"),
        ("[[fault]]\nkind = 'kill'\nevery_s = 1\ntimes = 3", "every_s needs at_s"),
        ("[[fault]]\nkind = 'kill'\nat_step = 9\ntimes = 3", "at_step is one moment"),
        ("[job]\nspares = 0\n[[fault]]\nkind = 'bad_spare'", "needs a spare"),
        ("seed = ", "is no schedule"),
    ],
)
def test_what_is_refused_and_how(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _load(tmp_path, text)
    assert words in str(refused.value)
    assert "given.toml" in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml is no schedule"):
        load_schedule(tmp_path / "absent.toml")


def test_the_seed_decides_and_the_place_alone(tmp_path: Path) -> None:
    one = "[[fault]]\nany_of = ['kill', 'segv', 'gil']\ntimes = 30\n"
    first = _load(tmp_path, f"seed = 1\n{one}").jobs
    assert first == _load(tmp_path, f"seed = 1\n{one}").jobs
    assert first != _load(tmp_path, f"seed = 2\n{one}").jobs
    followed = _load(tmp_path, f"seed = 1\n{one}[[fault]]\nkind = 'fuzz'\n").jobs
    assert followed[0].faults[:30] == first[0].faults
    faults = first[0].faults
    assert {fault.kind for fault in faults} == {"kill", "segv", "gil"}
    assert {fault.target.rank for fault in faults} == {0, 1, 2, 3}


def test_faults_share_a_job_where_they_can(tmp_path: Path) -> None:
    jobs = _load(
        tmp_path,
        "[job]\nset = ['a=1']\n"
        + "".join(
            f"[[fault]]\nkind = '{kind}'\n"
            for kind in ("kill", "exception", "unplugged", "segv", "exception", "partition")
        )
        + "[[fault]]\nkind = 'gil'\nset = ['b=2']\n",
    ).jobs
    assert [[fault.kind for fault in job.faults] for job in jobs] == [
        ["kill", "segv"],
        ["exception"],
        ["unplugged", "partition"],
        ["exception"],
        ["gil"],
    ]
    assert [job.namespaces for job in jobs] == [False, False, True, False, False]
    assert [job.overrides for job in jobs][-1] == ("a=1", "b=2")


def test_repeats_come_by_the_clock_and_in_its_order(tmp_path: Path) -> None:
    jobs = _load(
        tmp_path,
        "[[fault]]\nkind = 'kill'\nat_s = 50\nevery_s = 100\ntimes = 3\n"
        "[[fault]]\nkind = 'segv'\nat_s = 60\n[[fault]]\nkind = 'fuzz'\n",
    ).jobs
    assert [(fault.kind, fault.at_s) for fault in jobs[0].faults] == [
        ("fuzz", None),
        ("kill", 50.0),
        ("segv", 60.0),
        ("kill", 150.0),
        ("kill", 250.0),
    ]


def test_every_kind_says_what_is_expected_of_it() -> None:
    for name, kind in KINDS.items():
        quiet = kind.outcome in ("unmoved", "readopt")
        assert bool(kind.causes) != quiet, name
        assert not (quiet and kind.names), name
    assert len(KINDS) >= 25
