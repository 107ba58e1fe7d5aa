"""`megascale run`: from a command line to a job on several nodes, and back to an exit code.

The same command line again on the folder of a job whose driver died goes on where it was: agents
and ranks run on, and are taken over. A job that ended is continued with --resume.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale.cluster.backends import check_backend
from megascale.cluster.driver.address import check_address
from megascale.cluster.driver.journal import is_unfinished
from megascale.cluster.driver.layout import with_layout
from megascale.cluster.driver.program import Groups, Program
from megascale.cluster.driver.session import FOLDER, Job, run
from megascale.cluster.driver.takeover import check_same_start, settings_of
from megascale.cluster.transitions import Policy
from megascale.config import RunConfig, load_config
from megascale.errors import ConfigError
from megascale.plan.placement.job import JobPlacement, placement_of, topology_file
from megascale.telemetry.diagnose.hang import mesh_groups

FILES_ARE_HERE = ("local", "slurm")  # backends whose nodes have the files of this machine
SMALL = 100_000_000  # parameters of layers: their state is copied and hashed in half a second


def run_verb(
    words: Sequence[str],
    *,
    script: bool,
    run_dir: Path | None,
    overrides: Sequence[str],
    backend_options: Sequence[str],
    resume: bool,
    **rest: Any,
) -> int:
    """`megascale run`: words are a recipe, or with `script` a program and its arguments."""
    options = option_pairs(backend_options)
    if script:
        if run_dir is None or not words or resume:
            raise ConfigError(
                "--script runs PROGRAM in --run-dir FOLDER: megascale run --script --run-dir "
                "runs/mine --nodes 2 -- train.py ARGUMENTS; resuming is the program's own affair"
            )
        return run_script(
            words, run_dir=run_dir, overrides=overrides, backend_options=options, **rest
        )
    if len(words) != 1 or run_dir is not None:
        raise ConfigError(
            f"a recipe is wanted, got {' '.join(words) or 'nothing'}"
            f"{' and --run-dir' if run_dir else ''}; give one TOML file and its folder as --set "
            "job.run_dir=FOLDER, or a program of your own after --script"
        )
    recipe = Path(words[0])
    return run_job(recipe, overrides, resume=resume, backend_options=options, **rest)


def option_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, the value as JSON where it is some."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise ConfigError(f"--backend-set {pair!r} is not KEY=VALUE; for example hosts=4")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def run_job(
    recipe: Path,
    overrides: Sequence[str],
    *,
    nodes: int,
    procs_per_node: int,
    backend: str = "local",
    backend_options: Mapping[str, Any] | None = None,
    spares: int | None = None,
    resume: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
) -> int:
    """The verb with a recipe. Raises MegascaleError with what the user should read."""
    num_ranks = nodes * procs_per_node
    config, overrides = with_layout(recipe, overrides, num_ranks, are_ranks_here=backend == "local")
    config.mesh(num_ranks)
    run_dir = Path(config.job.run_dir).absolute()
    _check_folder(run_dir, resume=resume)
    cluster = config.cluster
    options = backend_options or {}
    _check_place(run_dir, backend, options, nodes, procs_per_node, spares, host, port)
    settings = settings_of(config, (), backend, options, host)
    _check_takeover(run_dir, settings, port)
    policy = Policy(
        num_nodes=nodes,
        procs_per_node=procs_per_node,
        cluster=cluster,
        spares=cluster.spares if spares is None else spares,
        legal_nodes=_legal_nodes(config, nodes, procs_per_node),
        can_save=config.checkpoint.enable,
        resume=(run_dir / "config.json").exists(),
        placement=placement_of(config, nodes, procs_per_node),
    )
    here = f"job.run_dir={json.dumps(str(run_dir), ensure_ascii=False)}"
    added = [here]
    if _saves_in_memory(config):
        added.append("checkpoint.memory_interval=1")
    words = [word for override in (*overrides, *added) for word in ("--set", override)]
    program = Program(
        run_dir,
        ("train", str(recipe.absolute()), *words),
        groups=lambda world_size: _groups(config, world_size),
    )
    job = Job(
        program,
        policy,
        backend,
        options,
        config,
        recipe,
        tuple(overrides),
        host=host,
        port=port,
        settings=settings,
    )
    return run(job)


def run_script(
    argv: Sequence[str],
    *,
    run_dir: Path,
    overrides: Sequence[str],
    nodes: int,
    procs_per_node: int,
    backend: str = "local",
    backend_options: Mapping[str, Any] | None = None,
    spares: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> int:
    """The verb with somebody else's program: argv, without what starts it being known.

    Of the configuration only [cluster] means something; see docs/cluster.md for what the program
    may tell about itself.
    """
    others = [override for override in overrides if not override.startswith("cluster.")]
    if others:
        raise ConfigError(
            f"--set {others[0]!r} with --script: only cluster.* is legal, the rest of the "
            "configuration is the recipe's; hand it to the script as its own argument"
        )
    cluster = load_config(None, overrides).cluster.model_copy(update={"warm": "off"})
    policy = Policy(
        num_nodes=nodes,
        procs_per_node=procs_per_node,
        cluster=cluster,
        spares=cluster.spares if spares is None else spares,
        legal_nodes=tuple(range(1, nodes + 1)),
        placement=JobPlacement(  # nothing is known of the program: a ring over all nodes
            procs_per_node, tensor=procs_per_node, topology=topology_file(cluster.topology, nodes)
        ),
    )
    options = backend_options or {}
    _check_place(run_dir, backend, options, nodes, procs_per_node, spares, host, port)
    settings = settings_of(None, argv, backend, options, host)
    _check_takeover(run_dir, settings, port)
    comes_back = is_unfinished(run_dir / FOLDER / "journal.sqlite")  # its ranks run on anyway
    if backend in FILES_ARE_HERE and not comes_back:
        _check_program(argv[0])
    argv = list(argv)
    if argv[0].endswith(".py"):
        argv = [sys.executable, "-u", *argv]
    program = Program(run_dir.absolute(), tuple(argv[1:]), argv=(argv[0],))
    job = Job(program, policy, backend, options, host=host, port=port, settings=settings)
    return run(job)


def _check_folder(run_dir: Path, *, resume: bool) -> None:
    """Like `megascale train`, except that a job whose driver died needs no --resume."""
    holds_run = (run_dir / "config.json").exists()
    holds_job = is_unfinished(run_dir / FOLDER / "journal.sqlite")
    if holds_run and not resume and not holds_job:
        raise ConfigError(
            f"{run_dir} already holds a run; continue it with --resume, or start a new one with "
            "--set job.run_dir=ANOTHER"
        )
    if resume and not holds_run and not holds_job:
        raise ConfigError(
            f"--resume: {run_dir} holds no run (no config.json); start without --resume, or set "
            "job.run_dir to the folder of the run"
        )


def _check_place(
    run_dir: Path,
    backend: str,
    options: Mapping[str, Any],
    nodes: int,
    procs_per_node: int,
    spares: int | None,
    host: str,
    port: int,
) -> None:
    """Where the job runs and where its driver listens. Raises LaunchError; nothing is made."""
    check_backend(
        backend,
        num_nodes=nodes,
        procs_per_node=procs_per_node,
        spares=spares or 0,
        options=options,
    )
    comes_back = is_unfinished(run_dir / FOLDER / "journal.sqlite")  # its port may be its own
    check_address(host, 0 if comes_back else port)


def _check_program(name: str) -> None:
    """Raises ConfigError for a program that no node could start."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ConfigError(
                f"--script: there is no file {name} in {Path.cwd()}; give its path from this folder"
            )
    elif shutil.which(name) is None:
        raise ConfigError(
            f"--script: {name} is no program that can be run; give the path of an executable file, "
            "the name of one on PATH, or a file that ends in .py"
        )


def _check_takeover(run_dir: Path, settings: Mapping[str, Any], port: int) -> None:
    if is_unfinished(run_dir / FOLDER / "journal.sqlite"):
        check_same_start(run_dir / FOLDER, settings, port)


def _saves_in_memory(config: RunConfig) -> bool:
    """Whether a recipe that does not say gets its state saved in memory at every step."""
    checkpoint, model = config.checkpoint, config.model
    small = 12 * model.num_layers * model.hidden_size**2 <= SMALL
    return checkpoint.enable and small and "memory_interval" not in checkpoint.model_fields_set


def _legal_nodes(config: RunConfig, nodes: int, procs_per_node: int) -> tuple[int, ...]:
    legal = []
    for count in range(1, nodes + 1):
        try:
            config.mesh(count * procs_per_node)
        except ConfigError:
            continue
        legal.append(count)
    return tuple(legal)


def _groups(config: RunConfig, world_size: int) -> Groups:
    return mesh_groups(config.mesh(world_size))
