"""One rank of a measured run: `megascale train`, and what is measured in its process beside it.

Started by the bench (`megascale bench rank`, which is not shown), never by a user: only here may a
step run without its communication, and nothing that it trains is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megascale.config import load_config
from megascale.env import rank_environment
from megascale.errors import ConfigError
from megascale.train.bench.beside import Beside
from megascale.train.bench.roof import measure_roof
from megascale.train.corpus import resolve_vocabulary
from megascale.train.rank import Ready
from megascale.train.start import become_rank
from megascale.train.waterfall.alone import alone_ns
from megascale.train.waterfall.silence import silenced


def bench_rank(recipe: Path, overrides: Sequence[str], beside: Beside) -> None:
    """Be one rank. Raises MegascaleError as `megascale train` does."""
    rank = rank_environment()
    if rank.launcher == "none":
        raise ConfigError(
            "`megascale bench rank` is a rank of `megascale bench step`, which starts it; it was "
            "started by hand: start `megascale bench step RECIPE`"
        )
    config = resolve_vocabulary(load_config(recipe, overrides))
    if beside.silent and config.checkpoint.enable:
        raise ConfigError(
            "a step without communication computes nothing that may be kept: set "
            "checkpoint.enable=false"
        )
    if beside.silent:  # ranks that do not meet have no common pace: each reads for itself
        data = config.data.model_copy(update={"loader": "rank"})
        config = config.model_copy(update={"data": data})

    @contextmanager
    def around(ready: Ready) -> Iterator[None]:
        if beside.roof:
            _roof(ready, beside, "before")
        with silenced(ready.recorder.span) if beside.silent else nullcontext():
            yield
        if beside.alone and ready.probe is not None:
            detail: dict[str, Any] = alone_ns(ready.probe, ready.assembly)
            ready.recorder.incident("alone", operators=detail)
        if beside.roof:
            _roof(ready, beside, "after")

    become_rank(config, rank, resume=False, around=around)


def _roof(ready: Ready, beside: Beside, when: str) -> None:
    assembly = ready.assembly
    found = measure_roof(
        assembly.config,
        assembly.mesh,
        assembly.device,
        warm_up_s=beside.warm_up_s,
        round_s=beside.round_s,
    )
    ready.recorder.incident("roof", when=when, **asdict(found))
