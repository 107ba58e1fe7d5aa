"""`megascale train`: check everything that can be checked, then become ranks.

A command line without a launcher's variables is the parent: it checks the configuration, the data
and the run folder, chooses the layout where it is asked to, and starts N ranks (or becomes the only
one). Under torchrun's or srun's variables the same command line is one rank.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.config import RunConfig, load_config
from megascale.env import RankEnvironment, agent_environment, rank_environment
from megascale.errors import CheckpointError, ConfigError, MegascaleError
from megascale.plan.describe import describe
from megascale.plan.search.auto import predict, predicted
from megascale.train import auto_layout
from megascale.train.corpus import resolve_vocabulary
from megascale.train.devices import check_devices_can
from megascale.train.launch import launch_local, record_failure
from megascale.train.placed import placed, preview
from megascale.train.run_folder import RunFolder

if TYPE_CHECKING:
    from megascale.train.rank import Around

logger = logging.getLogger(__name__)


def start_training(
    recipe: Path,
    overrides: Sequence[str],
    *,
    nproc: int | None,
    resume: bool,
    dry_run: bool,
    master_port: int | None,
) -> None:
    """The verb. Raises MegascaleError with what the user should read."""
    rank = rank_environment()
    recipe, overrides = _resolve_run_folder(recipe, overrides)
    config = load_config(recipe, overrides)
    if dry_run:
        _print_plan(config, nproc or rank.world_size, resume=resume)
        return
    config = resolve_vocabulary(config)
    folder = RunFolder(config.job.run_dir)
    if rank.launcher != "none":
        for option, value in (("--nproc", nproc), ("--master-port", master_port)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value} was given to a rank that {rank.launcher} started; "
                    "leave it out"
                )
        if rank.world_size == 1:
            config, _ = _with_layout(config, 1, resume=resume)
        if not auto_layout.is_open(config):  # else when the ranks have met (`rank.py`)
            check_devices_can(config, rank.world_size)
        rank = placed(config, rank, layout_is_open=auto_layout.is_open(config))
        become_rank(config, rank, resume=resume)
        return
    num_ranks = nproc or 1
    folder.check(resume=resume)
    config, chosen = _with_layout(config, num_ranks, resume=resume)
    overrides = [*overrides, *chosen]
    check_devices_can(config, num_ranks)
    _check_initial_weights(config)
    if num_ranks == 1:
        become_rank(config, rank, resume=resume)
        return
    arguments = ["train", str(recipe), *_flags(overrides), *(["--resume"] if resume else [])]
    launch_local(arguments, num_ranks, folder.logs, master_port)


def _resolve_run_folder(recipe: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The recipe's file and the overrides. A folder given as recipe is the run's, wherever it was.

    Its config.json remembers the folder of the first start, which may have been moved or copied.
    """
    if not recipe.is_dir():
        return recipe, list(overrides)
    here = [f"job.run_dir={json.dumps(str(recipe), ensure_ascii=False)}"]  # a string of TOML
    return RunFolder(recipe).config_file, [*here, *overrides]  # the last one wins


def _with_layout(config: RunConfig, num_ranks: int, *, resume: bool) -> tuple[RunConfig, list[str]]:
    """The configuration with a layout, and the overrides that make it where it was chosen."""
    if not auto_layout.is_open(config):
        return config, []
    resolved = auto_layout.choose(config, num_ranks, resume=resume)
    typer.echo(resolved.told)
    auto_layout.keep(resolved, RunFolder(config.job.run_dir))
    return resolved.config, resolved.overrides


def _check_initial_weights(config: RunConfig) -> None:
    """What needs no torch; the ranks look into the folder."""
    source = config.checkpoint.initial_load_path
    if source and not Path(source).is_dir():
        raise CheckpointError(
            f"checkpoint.initial_load_path is {source!r}, which is no folder; name a run folder, "
            "a checkpoint, or a Hugging Face folder"
        )


def _flags(overrides: Sequence[str]) -> list[str]:
    return [argument for override in overrides for argument in ("--set", override)]


def _print_plan(config: RunConfig, world_size: int, *, resume: bool) -> None:
    """A dry run; it needs the data for nothing but a vocabulary that the recipe leaves out."""
    sized = config if config.model.vocab_size else resolve_vocabulary(config)
    cluster = config.parallelism.cluster
    told = None
    if auto_layout.is_open(sized):
        resolved = auto_layout.choose(sized, world_size, resume=resume)
        sized, told = resolved.config, resolved.told
    check_devices_can(sized, world_size)
    description = str(describe(sized, world_size))
    if told is None and cluster:
        told = predicted(predict(sized, world_size, cluster), cluster)
    typer.echo(sized.model_dump_json(indent=2))
    typer.echo(description)
    if told is not None:
        typer.echo(told)
    if config.cluster.topology:
        typer.echo(preview(sized, world_size))


def become_rank(
    config: RunConfig, rank: RankEnvironment, *, resume: bool, around: Around = nullcontext
) -> None:
    """Train as one rank. A failure is recorded where whoever started this rank looks for it.

    around  of `rank.run_rank`
    """
    from megascale.train.rank import run_rank  # torch is imported by ranks only

    logging.basicConfig(
        level=logging.INFO if rank.global_rank == 0 else logging.WARNING,
        format=f"[rank{rank.global_rank}] %(message)s",
        stream=sys.stdout if rank.global_rank == 0 else sys.stderr,
    )
    folder = RunFolder(config.job.run_dir)
    epoch = agent_environment().epoch
    holding = folder.hold(resume=resume, epoch=epoch) if rank.global_rank == 0 else nullcontext()
    try:
        with holding:  # rank 0 alone: others may see the records that it writes next
            run_rank(config, rank, resume=resume, around=around)
    except MegascaleError as error:
        _record(folder, rank, str(error), error.exit_code)
        raise
    except Exception as error:  # the edge of the process: recorded, then raised
        _record(folder, rank, f"{type(error).__name__}: {error}", 1)
        raise


def _record(folder: RunFolder, rank: RankEnvironment, message: str, exit_code: int) -> None:
    if rank.world_size == 1:
        return
    try:
        record_failure(folder.logs, rank.global_rank, message, exit_code)
    except OSError as error:  # must not take the place of the failure
        logger.warning("the failure of rank %d was not recorded: %s", rank.global_rank, error)
