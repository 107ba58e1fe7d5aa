"""Ranks that were given different runs refuse to start; a stuck rank is told with a place."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from megascale.config import load_config
from megascale.errors import ConfigError
from megascale.train.agreement import check_agreement
from tests.distributed import run_ranks
from tests.train.command import (
    SMALL,
    end,
    flags,
    num_lines,
    rank_process,
    started,
    wait_until,
    write_recipe,
)
from tests.train.harness import TINY


def _agree(rank: int, world_size: int, of_rank_1: list[str]) -> str:
    config = load_config(None, [*TINY, *(of_rank_1 if rank == 1 else [])])
    try:
        check_agreement(config)
    except ConfigError as error:
        return str(error)
    return "agreed"


@pytest.mark.full
@pytest.mark.parametrize(
    ("of_rank_1", "told"),
    [
        (["optimizer.lr=0.5"], "rank 1 was given another run than rank 0: optimizer.lr is 0.5, "),
        (["model.vocab_size=300"], "model.vocab_size is 300, rank 0 has 256; start all ranks"),
        (["job.run_dir=elsewhere"], "agreed"),
    ],
)
def test_ranks_compare_what_they_were_given(of_rank_1: list[str], told: str) -> None:
    for said in run_ranks(_agree, 2, of_rank_1):
        assert told in said


@pytest.mark.full
def test_a_stuck_rank_is_noticed_at_the_deadline(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*SMALL, f"job.run_dir={run}", "training.steps=100000", "comm.timeout_s=4"]
    arguments = ["train", str(write_recipe(tmp_path)), "--nproc", "2", *flags(settings)]
    with started(arguments) as process:
        wait_until(lambda: num_lines(run / "metrics.jsonl") >= 3, process)
        rank_process(process, 1).send_signal(signal.SIGSTOP)
        since = time.monotonic()
        code, _, errors = end(process)
        assert time.monotonic() - since < 25
    assert code == 5
    assert "rank 0 of 2 (tensor 0, data 0, pipeline 0) failed in " in errors
    assert "The deadline is comm.timeout_s" in errors
