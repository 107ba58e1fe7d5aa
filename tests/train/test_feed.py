"""One loader a node in training: the same bits in every layout, shared by ranks, and its end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.config import load_config
from megascale.telemetry.hooks import Hook
from megascale.train.feed import NodeFeed, RankFeed, open_feed
from megascale.train.loop import Loop
from tests.distributed import run_ranks
from tests.train.harness import TINY
from tests.train.runs import Layout, curve, metrics, samples, train

LAYOUTS: dict[str, Layout] = {
    "tp2-dp2": {"tp": 2, "dp": 2, "pp": 1, "zero": 2},
    "pp2": {"tp": 1, "dp": 1, "pp": 2},
    "dp2": {"tp": 1, "dp": 2, "pp": 1},
}
SETTINGS = ["training.steps=6", "checkpoint.enable=false", "validation.interval=3"]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_same_bits_whoever_reads(tmp_path: Path, layout: str) -> None:
    ramp = "training.batch_ramp_up={start=4,increment=4,samples=12}"
    found = {}
    for loader in ("rank", "node"):
        run = tmp_path / loader
        more = [*SETTINGS, ramp, f"data.loader={loader}"]
        assert train(run, LAYOUTS[layout], more) == [None] * len(_ranks(layout))
        held_out = [line["validation_loss"] for line in metrics(run) if "validation_loss" in line]
        found[loader] = (curve(run), samples(run), held_out)
    assert found["node"] == found["rank"]
    assert len(found["node"][0]) == 6
    assert len(found["node"][2]) == 2


def _ranks(layout: str) -> range:
    sizes = LAYOUTS[layout]
    return range(sizes["tp"] * sizes["dp"] * sizes["pp"])


def _attached(rank: int, world_size: int, settings: list[str]) -> dict[str, Any]:
    config = load_config(None, [*TINY, *settings])
    mesh = config.mesh(world_size)
    place = mesh.coordinates(rank)
    feed = open_feed(config, mesh, place)
    if isinstance(feed, RankFeed):
        return {"loader": None}
    assert isinstance(feed, NodeFeed)
    steps = feed.steps(0)
    batch = next(steps)
    ring = feed.memory.rings[0]
    share = ring.shape.dp_ranks.index(place.dp_rank)
    found = {
        "loader": feed.memory.place.loader,
        "owns": feed.loader is not None,
        "inode": feed.memory.inode,
        "offset": ring.shape.share_at(0, share),
        "bytes": ring.shape.num_bytes,
        "dp_rank": place.dp_rank,
        "samples": [int(n) for m in batch.micro_batches for n in m.sample_numbers_B],
    }
    feed.close()
    return found


def test_ranks_of_a_tensor_group_read_the_same_bytes() -> None:
    found = run_ranks(_attached, 4, ["parallelism.tensor_parallel_size=2"])
    assert [one["owns"] for one in found] == [True, False, False, False]
    assert len({(one["loader"], one["inode"]) for one in found}) == 1
    for first, second in ((0, 1), (2, 3)):
        assert found[first]["offset"] == found[second]["offset"]
        assert found[first]["samples"] == found[second]["samples"]
    assert found[0]["offset"] != found[2]["offset"]
    assert sorted(found[0]["samples"] + found[2]["samples"]) == list(range(8))
    tensor = run_ranks(_attached, 4, ["parallelism.tensor_parallel_size=4"])
    single = run_ranks(_attached, 1, ["data.loader=node"])
    assert {one["bytes"] for one in tensor} == {single[0]["bytes"]}, "not by tensor ranks"


def test_who_reads_by_default_depends_on_the_ranks_of_the_node() -> None:
    assert run_ranks(_attached, 1, []) == [{"loader": None}]
    alone = ["data.prefetch=0"], ["data.loader=rank"]
    for settings in alone:
        assert run_ranks(_attached, 2, settings) == [{"loader": None}] * 2


class _KillLoader(Hook):
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def on_step_end(self, step: int) -> None:
        feed = self._loop._feed
        if step == 3 and isinstance(feed, NodeFeed) and feed.loader is not None:
            os.kill(feed.memory.place.loader, signal.SIGKILL)


def _plant(loop: Loop) -> None:
    loop.recorder.hooks.append(_KillLoader(loop))


def test_a_loader_that_dies_ends_all_ranks_with_one_error(tmp_path: Path) -> None:
    since = time.monotonic()
    more = [*SETTINGS, "training.steps=40", "validation.interval=0"]
    errors = train(tmp_path / "run", LAYOUTS["tp2-dp2"], more, plant=_plant)
    assert time.monotonic() - since < 40
    for error in errors:
        assert error is not None
        assert error.startswith("LaunchError: the loader of node ")
        assert "is gone and left no word" in error
        assert "start the run again with --resume" in error


def test_a_loader_that_cannot_start_is_told_by_every_rank(tmp_path: Path) -> None:
    errors = train(tmp_path / "run", LAYOUTS["dp2"], [*SETTINGS, "data.prefetch=64"])
    told = "data.prefetch is 64, and the loader of a node reads at most 63 global batches ahead; "
    assert [error and error.partition("lower it")[0] for error in errors] == [
        f"ConfigError: {told}",
        f"ConfigError: as rank 0 said: {told}",
    ]
