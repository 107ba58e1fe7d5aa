"""The tuner: right before fast, equal on all ranks, never measuring where it was not asked to.

The clock is handed in, so every number here is chosen; the groups are real (gloo).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.default_rule import OTHERWISE, RULE, UNBOUNDED, default_form
from megascale.flux.problem import Problem
from megascale.flux.timing import Probe, calls_of_burst, interleave
from megascale.flux.tuner import Candidate, Tuner
from megascale.flux.tuning_cache import Choice, Key, TuningCache
from tests.distributed import run_ranks

PROBLEM = Problem("gemm_rs", 4096, 8192, 4096, 2, torch.float32, "NK")
KEY = Key.of(PROBLEM)
RIGHT = torch.arange(1.0, 7.0).reshape(2, 3)


@dataclass(frozen=True)
class Tiles:
    block_m: int
    stages: int = 3


class FakeTimer:
    """Gives the milliseconds of a table, by what the run returns as its name; counts its calls."""

    def __init__(self, ms: dict[str, float]) -> None:
        self.ms = ms
        self.calls: list[str] = []

    def prepare(self, run: Callable[[], object]) -> Probe:
        name = run.__name__
        self.calls.append(f"prepare {name}")
        if name not in self.ms:
            raise RuntimeError(f"{name} cannot be captured")

        def probe() -> float:
            self.calls.append(name)
            return self.ms[name]

        return probe


def _candidate(name: str, config: object = None, result: Any = RIGHT) -> Candidate:
    def run() -> object:
        if isinstance(result, Exception):
            raise result
        return result

    run.__name__ = name if config is None else f"{name}-{config.block_m}"  # type: ignore[attr-defined]
    return Candidate(name, config, run)


def _choose(ms: dict[str, float], candidates: list[Candidate], **options: Any) -> Candidate:
    tuner = Tuner(TuningCache(), None, FakeTimer(ms), tune="now", **options)
    return tuner.choose(KEY, candidates)


def test_the_fastest_is_chosen_by_the_median_of_interleaved_rounds() -> None:
    timer = FakeTimer({"nccl": 1.6, "chunked": 1.5, "fused-128": 1.2, "fused-64": 1.1})
    candidates = [
        _candidate("nccl"),
        _candidate("chunked"),
        _candidate("fused", Tiles(128)),
        _candidate("fused", Tiles(64)),
    ]
    cache = TuningCache()
    tuner = Tuner(cache, None, timer, tune="now", num_rounds=3)
    chosen = tuner.choose(KEY, candidates)
    assert (chosen.name, chosen.config) == ("fused", Tiles(64))
    order = [call for call in timer.calls if not call.startswith("prepare")]
    assert order == ["chunked", "fused-128", "fused-64", "nccl"] * 3
    assert cache.get(KEY) == Choice(
        "fused",
        {"block_m": 64, "stages": 3},
        {
            "chunked": 1.5,
            "fused(block_m=128, stages=3)": 1.2,
            "fused(block_m=64, stages=3)": 1.1,
            "nccl": 1.6,
        },
    )
    assert tuner.known(KEY) == cache.get(KEY)


def test_a_cache_that_cannot_be_written_is_a_warning_and_the_choice_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 alone writes: were it an error, its peers would go on without it."""
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file" / "tuned.json")
    tuner = Tuner(cache, None, FakeTimer({"nccl": 2.0, "fused": 1.0}), tune="now")
    for _ in range(2):
        assert tuner.choose(KEY, [_candidate("nccl"), _candidate("fused")]).name == "fused"
    (warning,) = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert "The choice holds for this process" in warning


def test_one_slow_round_does_not_decide() -> None:
    bursts = iter([1.0, 9.0, 1.0, 1.0, 1.0])
    samples = interleave({"a": lambda: next(bursts)}, 5)
    assert samples == {"a": [1.0, 9.0, 1.0, 1.0, 1.0]}
    timer = FakeTimer({})
    noisy = iter([9.0, 1.0, 1.0, 9.0, 1.0])

    def prepare(run: Callable[[], object]) -> Probe:
        return (lambda: next(noisy)) if run.__name__ == "fused" else (lambda: 2.0)

    timer.prepare = prepare  # type: ignore[method-assign]
    tuner = Tuner(TuningCache(), None, timer, tune="now", num_rounds=5)
    assert tuner.choose(KEY, [_candidate("nccl"), _candidate("fused")]).name == "fused"


def test_who_is_far_behind_twice_is_not_asked_again() -> None:
    timer = FakeTimer({"nccl": 2.0, "chunked": 1.4, "fused": 1.0})
    tuner = Tuner(TuningCache(), None, timer, tune="now", num_rounds=3)
    assert tuner.choose(KEY, [_candidate(name) for name in timer.ms]).name == "fused"
    bursts = {name: timer.calls.count(name) for name in timer.ms}
    assert bursts == {"nccl": 2, "chunked": 3, "fused": 3}


def test_equal_times_go_by_name() -> None:
    ms = {"nccl": 1.0, "chunked": 1.0, "plain": 1.0}
    assert _choose(ms, [_candidate(name) for name in ms]).name == "chunked"
    assert _choose(ms, [_candidate(name) for name in reversed(ms)]).name == "chunked"


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (RIGHT * 1.001, "fused is excluded: relative error 1.00e-03 (limit 1e-04)"),
        (torch.where(RIGHT == 4.0, 4.01, RIGHT), "worst element off by"),
        (torch.full_like(RIGHT, torch.nan), "fused is excluded: relative error nan"),
        (RIGHT[:1], "fused is excluded: shapes [[1, 3]] and not [[2, 3]]"),
        (([RIGHT], RIGHT), "fused is excluded: shapes [[2, 3], [2, 3]] and not [[2, 3]]"),
        (RuntimeError("out of resources"), "fused is excluded: fails: out of resources"),
    ],
)
def test_a_wrong_candidate_is_excluded_and_named(
    caplog: pytest.LogCaptureFixture, result: object, complaint: str
) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = _choose(
            {"nccl": 2.0, "fused": 1.0}, [_candidate("nccl"), _candidate("fused", result=result)]
        )
    assert chosen.name == "nccl"
    assert complaint in caplog.text


def test_a_candidate_that_cannot_be_timed_is_excluded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _choose({"nccl": 2.0}, [_candidate("nccl"), _candidate("fused")]).name == "nccl"
    assert "fused is excluded: cannot be timed: fused cannot be captured" in caplog.text
    with pytest.raises(RuntimeError, match="nccl cannot be captured"):
        _choose({"fused": 1.0}, [_candidate("nccl"), _candidate("fused")])


def test_results_of_several_tensors_are_compared_one_by_one() -> None:
    both = ([RIGHT, RIGHT * 2], RIGHT * 3)
    ms = {"nccl": 2.0, "fused": 1.0}
    right = _candidate("fused", result=([RIGHT, RIGHT * 2], RIGHT * 3))
    wrong = _candidate("fused", result=([RIGHT, RIGHT * 2], RIGHT))
    assert _choose(ms, [_candidate("nccl", result=both), right]).name == "fused"
    assert _choose(ms, [_candidate("nccl", result=both), wrong]).name == "nccl"


def test_inputs_of_zeros_and_ranks_without_rows_exclude_nobody() -> None:
    ms = {"nccl": 2.0, "fused": 1.0}
    for result in (torch.zeros(2, 3), torch.zeros(0, 3)):
        candidates = [_candidate(name, result=result) for name in ms]
        assert _choose(ms, candidates).name == "fused"


def test_without_tuning_nothing_is_run() -> None:
    timer = FakeTimer({})
    never = RuntimeError("was run")
    candidates = [_candidate(name, result=never) for name in ("nccl", "chunked", "plain")]
    cache = TuningCache()
    tuner = Tuner(cache, None, timer)
    assert default_form(PROBLEM) == "fused"
    assert tuner.choose(KEY, candidates).name == "chunked", "the rule's form is not offered"
    assert tuner.choose(KEY, [*candidates, _candidate("fused", Tiles(64), never)]).name == "fused"
    cache.put(KEY, Choice("plain"))
    assert tuner.choose(KEY, candidates).name == "plain"
    assert timer.calls == []


def test_a_rule_s_answer_does_not_stop_tuning_later() -> None:
    tuner = Tuner(TuningCache(), None, FakeTimer({"nccl": 1.0, "chunked": 2.0}))
    candidates = [_candidate("nccl"), _candidate("chunked")]
    assert tuner.choose(KEY, candidates).name == "chunked"
    assert tuner.choose(KEY, candidates, tune="now").name == "nccl"
    assert tuner.choose(KEY, candidates).name == "nccl"


def test_the_second_call_measures_nothing() -> None:
    timer = FakeTimer({"nccl": 1.0, "chunked": 2.0})
    tuner = Tuner(TuningCache(), None, timer, tune="now")
    candidates = [_candidate("nccl"), _candidate("chunked")]
    tuner.choose(KEY, candidates)
    calls = len(timer.calls)
    assert tuner.choose(KEY, candidates).name == "nccl"
    assert len(timer.calls) == calls


def test_an_entry_that_is_not_offered_any_more_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = TuningCache()
    cache.put(KEY, Choice("fused", {"block_m": 7, "stages": 3}))
    tuner = Tuner(cache, None, FakeTimer({}))
    candidates = [_candidate("nccl"), _candidate("fused", Tiles(64))]
    with caplog.at_level(logging.WARNING):
        assert tuner.choose(KEY, candidates).config == Tiles(64), "by the rule"
        tuner.choose(KEY, candidates)
    assert caplog.text.count("fused {'block_m': 7, 'stages': 3} is not offered for") == 1


def _ranks_measure_differently(rank: int, world_size: int, folder: str) -> list[object]:
    # alone, rank 0 would take a, rank 1 b and rank 2 c; the slowest rank's times are 5, 3, 4
    ms = [
        {"nccl": 6.0, "a": 1.0, "b": 3.0, "c": 4.0},
        {"nccl": 6.0, "a": 5.0, "b": 1.0, "c": 4.0},
        {"nccl": 6.0, "a": 5.0, "b": 3.0, "c": 1.0},
    ][rank]
    group = dist.group.WORLD
    # each rank reads a path of its own: the cache that counts is rank 0's
    cache = TuningCache.load(Path(folder) / f"rank{rank}.json")
    if rank == 1:
        cache.put(KEY, Choice("a"))
    tuner = Tuner(cache, group, FakeTimer(ms), tune="now")
    candidates = [_candidate(name) for name in ms]
    chosen = tuner.choose(KEY, candidates)
    measured = tuner.known(KEY)
    assert measured is not None
    # wrong on one rank only
    other = Key.of(PROBLEM, "graph")
    bad: Tensor | None = RIGHT + 1 if rank == 2 else RIGHT
    candidates = [_candidate("nccl"), _candidate("a"), _candidate("b", result=bad)]
    second = tuner.choose(other, candidates)
    return [chosen.name, measured.ms, second.name]


def test_ranks_that_measure_different_times_agree(tmp_path: Path) -> None:
    results = run_ranks(_ranks_measure_differently, 3, str(tmp_path))
    assert results == [["b", {"a": 5.0, "b": 3.0, "c": 4.0, "nccl": 6.0}, "a"]] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["rank0.json"], "one rank writes"
    cached = TuningCache.load(tmp_path / "rank0.json")
    assert cached.get(KEY) == Choice("b", None, {"a": 5.0, "b": 3.0, "c": 4.0, "nccl": 6.0})


def _only_rank_0_has_the_file(rank: int, world_size: int, path: str) -> list[str]:
    cache = TuningCache.load(path) if rank == 0 else TuningCache()
    tuner = Tuner(cache, dist.group.WORLD, FakeTimer({}))
    return [tuner.choose(KEY, [_candidate("nccl"), _candidate("fused")]).name]


def test_the_cache_of_rank_0_is_everybody_s(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "tuned.json")
    cache.put(KEY, Choice("nccl"))
    cache.save()
    assert run_ranks(_only_rank_0_has_the_file, 2, str(cache.path)) == [["nccl"]] * 2


def test_the_default_rule_answers_for_every_number_of_rows() -> None:
    for (op, mode), rows in RULE.items():
        bounds = [most_rows for most_rows, _ in rows]
        assert bounds == sorted(bounds)
        assert bounds[-1] == UNBOUNDED
        for m in (1, *(b for b in bounds[:-1]), *(b + 1 for b in bounds[:-1]), 1 << 40):
            problem = Problem(op, m, 8, 8, 2, torch.bfloat16, "NK")
            expected = next(form for most_rows, form in rows if m <= most_rows)
            assert default_form(problem, mode) == expected
    assert OTHERWISE[-1] == "nccl", "what exists everywhere comes last"


@pytest.mark.parametrize(
    ("call_ms", "calls"), [(20.0, 1), (4.0, 1), (1.5, 2), (0.9, 4), (0.1, 40), (1e-6, 50)]
)
def test_calls_of_a_burst(call_ms: float, calls: int) -> None:
    assert calls_of_burst(call_ms, 4.0, 50) == calls
