"""Whole runs on gloo ranks: loop, checkpoints, data, signals and records, as the program has them.

A run leaves everything in its folder, so a killed run can be looked at like one that ended. Losses
are compared through `metrics.jsonl`, whose numbers are written so that they read back as the same
bits, and parameters through checkpoints, which hold logical tensors whatever the layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megascale.checkpoint import FullReader
from megascale.checkpoint.saved_model import find_checkpoint
from megascale.config import load_config
from megascale.data import BatchSource, GlobalBatch
from megascale.env import RankEnvironment
from megascale.errors import MegascaleError
from megascale.telemetry.hooks import Hook
from megascale.train import loop
from megascale.train.assemble import assemble
from megascale.train.feed import Feed, open_feed
from megascale.train.loop import Loop
from megascale.train.recording import open_recorder
from megascale.train.run_folder import RunFolder
from tests.distributed import run_ranks
from tests.train.harness import TINY

SINGLE = {"tp": 1, "dp": 1, "pp": 1}
Layout = dict[str, int]
Plant = Callable[[Loop], None]
"""Changes a rank before it trains; a module-level function, or an object of a module's class."""


def train(
    folder: Path,
    layout: Layout,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    kill_after: int | None = None,
    plant: Plant | None = None,
) -> list[str | None]:
    """Train in `folder`; the error that each rank ended with (of a killed run: nothing).

    kill_after  all ranks end by SIGKILL after this step, before its values are read
    """
    settings = [*TINY, *_settings(layout), *overrides, f"job.run_dir={folder}"]
    world_size = layout["tp"] * layout["dp"] * layout["pp"]
    arguments = (_train_rank, world_size, settings, resume, kill_after, plant)
    if kill_after is None:
        return run_ranks(*arguments)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(*arguments)
    return []


def _settings(layout: Layout) -> list[str]:
    return [
        f"parallelism.tensor_parallel_size={layout['tp']}",
        f"parallelism.pipeline_parallel_size={layout['pp']}",
        f"parallelism.virtual_pipeline_size={layout.get('vp', 1)}",
        f"parallelism.zero_stage={layout.get('zero', 1)}",
        "parallelism.bucket_mb=0.05",
        "metrics.tensorboard=false",
    ]


class _Killer(Hook):
    def __init__(self, after: int | None) -> None:
        self._after = after

    def on_step_end(self, step: int) -> None:
        if step == self._after:
            os.kill(os.getpid(), signal.SIGKILL)


def _train_rank(
    rank: int,
    world_size: int,
    settings: list[str],
    resume: bool,
    kill_after: int | None,
    plant: Plant | None,
) -> str | None:
    """`megascale.train.rank.run_rank` in a process group that exists already."""
    config = load_config(None, settings)
    mesh, device = config.mesh(world_size), torch.device("cpu")
    folder = RunFolder(config.job.run_dir)
    environment = RankEnvironment(rank, world_size, rank, world_size)
    hooks = [_Killer(kill_after)]
    seen = folder.path / f"samples-{rank}.jsonl"
    try:
        with (
            open_recorder(config, environment, mesh, device, folder, hooks) as recorder,
            mock.patch.object(loop, "open_feed", _recording(open_feed, seen)),
        ):
            assembly = assemble(config, mesh, device, span=recorder.span)
            rank_loop = Loop(assembly, folder, recorder)
            if plant is not None:
                plant(rank_loop)
            rank_loop.run(resume=resume)
    except MegascaleError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _recording(original: Callable[..., Feed], seen: Path) -> Callable[..., Feed]:
    """`original`, whose training steps are written down as they are taken."""

    def open_(*arguments: Any) -> Feed:
        feed = original(*arguments)
        steps = feed.steps
        feed.steps = lambda consumed_samples: _Recording(steps(consumed_samples), seen)  # type: ignore[method-assign]
        return feed

    return open_


class _Recording:
    def __init__(self, source: BatchSource, seen: Path) -> None:
        self._source, self._seen = source, seen
        self.is_ready, self.close = source.is_ready, source.close

    def __next__(self) -> GlobalBatch:
        batch = next(self._source)
        with self._seen.open("a") as file:
            file.write(json.dumps([batch.first_sample, _digests(batch)]) + "\n")
        return batch


def _digests(batch: GlobalBatch) -> dict[int, str]:
    """Sample number to a hash of its tokens, labels and mask."""
    return {
        int(number): hashlib.sha256(
            tokens.tobytes() + labels.tobytes() + mask.tobytes()
        ).hexdigest()
        for micro in batch.micro_batches
        for number, tokens, labels, mask in zip(
            micro.sample_numbers_B,
            micro.tokens_BS,
            micro.labels_BS,
            micro.loss_mask_BS,
            strict=True,
        )
    }


# ---------------------------------------------------------------- what a run left behind


def samples(folder: Path) -> dict[int, dict[str, str]]:
    """First sample of a step to the step's sample numbers and hashes, of all ranks and starts.

    Asserts that whoever read a sample, in whichever start, read the same.
    """
    steps: dict[int, dict[str, str]] = {}
    for file in folder.glob("samples-*.jsonl"):
        for line in file.read_text().splitlines():
            first, digests = json.loads(line)
            step = steps.setdefault(first, {})
            for number, digest in digests.items():
                assert step.setdefault(number, digest) == digest, (file, first, number)
    return dict(sorted(steps.items()))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in the order of writing."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Step to its loss and gradient norm. Asserts that replayed steps gave the same bits."""
    points: dict[int, tuple[float, float]] = {}
    for line in metrics(folder):
        if "loss" in line:
            point = line["loss"], line["grad_norm"]
            assert points.setdefault(line["step"], point) == point, line
    return points


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in RunFolder(folder).checkpoints.iterdir())


def state(folder: Path) -> dict[str, NDArray[Any]]:
    """Masters and moments of the newest checkpoint, whole."""
    reader = FullReader(find_checkpoint(folder), verified=True)
    return {key: reader.read(key).numpy() for key in reader.keys("")}


def assert_same_bits(got: Path, expected: Path) -> None:
    left, right = state(got), state(expected)
    assert left.keys() == right.keys()
    for key, values in left.items():
        np.testing.assert_array_equal(values, right[key], err_msg=key)
