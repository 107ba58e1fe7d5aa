"""What a driver must have in common with the one whose job it takes over.

`RUN_DIR/driver/job.json` has what the job was started with: every key of its configuration, its
program, its backend with options, its address. The driver's own section `[cluster]` and the number
of spares may be others after a takeover: they are no business of ranks that run on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale.cluster.transitions import Policy
from megascale.config import RunConfig
from megascale.errors import ConfigError

FILE = "job.json"
_FREE = ("cluster", "job.run_dir")
_ABSENT = "not set"
# What an update cannot change: the next epoch would not load the state of the one before, or it is
# the driver's, which reads its own once.
_FIXED = (
    "cluster.",
    "data.document_mask",
    "data.mask_end_of_document",
    "data.mixture",
    "data.packing",
    "data.path",
    "job.run_dir",
    "model.",
    "training.seed",
    "training.seq_len",
)
_DROPOUTS = ("model.attention_dropout", "model.hidden_dropout")  # of the model, but may


def check_same_job(old: Policy, new: Policy) -> None:
    """Raises ConfigError: ranks that run on were numbered for the shape that the job began with."""
    if (old.num_nodes, old.procs_per_node) != (new.num_nodes, new.procs_per_node):
        raise ConfigError(
            f"this folder holds an unfinished job of {old.num_nodes} nodes with "
            f"{old.procs_per_node} ranks each, this start has {new.num_nodes} with "
            f"{new.procs_per_node}; take it over with --nodes {old.num_nodes} --procs-per-node "
            f"{old.procs_per_node}, or stop it first and go on with --resume"
        )


def settings_of(
    config: RunConfig | None,
    words: Sequence[str],
    backend: str,
    backend_options: Mapping[str, Any],
    host: str,
) -> dict[str, Any]:
    """What ranks and agents of a job depend on, flat; words: of somebody else's program."""
    settings: dict[str, Any] = {} if config is None else flat(config.model_dump(mode="json"))
    if config is None:
        settings["program"] = " ".join(words)
    settings["--backend"] = backend
    settings |= {f"--backend-set {key}": value for key, value in backend_options.items()}
    settings["--host"] = host
    return {
        key: value
        for key, value in settings.items()
        if not any(key == free or key.startswith(free + ".") for free in _FREE)
    }


def remember(folder: Path, settings: Mapping[str, Any]) -> None:
    """For the drivers after this one."""
    new = folder / (FILE + ".new")
    new.write_text(json.dumps(dict(settings), indent=1) + "\n")
    new.replace(folder / FILE)


def check_same_start(folder: Path, settings: Mapping[str, Any], port: int = 0) -> None:
    """Raises ConfigError with every difference to what the job in `folder` was started with.

    port  that was asked for, 0: none; agents look for their driver at the port it had
    """
    try:
        old = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return  # its driver died before its first second was over
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read ({error}); move it away") from None
    now = json.loads(json.dumps(dict(settings)))
    had = port_before(folder)
    if port and had and port != had:
        old["--port"], now["--port"] = had, port
    keys = [key for key in {**old, **now} if old.get(key, _ABSENT) != now.get(key, _ABSENT)]
    if not keys:
        return
    told = [f"  {k}: {old.get(k, _ABSENT)!r} then, {now.get(k, _ABSENT)!r} now" for k in keys[:30]]
    more = [f"  and {len(keys) - 30} more"] if len(keys) > 30 else []
    live = [f"{key}={json.dumps(now[key])}" for key in keys[:30] if key in now and _is_live(key)]
    update = (
        f"; while it runs, change values with POST /v1/update {json.dumps({'overrides': live})}"
        if live and "program" not in now
        else ""
    )
    raise ConfigError(
        "\n".join([f"{folder.parent} holds an unfinished job that was started otherwise:", *told])
        + "".join(f"\n{line}" for line in more)
        + "\ntake it over with the command line and recipe that it was started with"
        + f"{update}; or stop it first and go on with --resume"
    )


def is_fixed(key: str) -> bool:
    """Whether an update of a running job cannot change it."""
    return key.startswith(_FIXED) and key not in _DROPOUTS


def _is_live(key: str) -> bool:
    return not key.startswith("--") and not is_fixed(key)


def port_before(folder: Path) -> int:
    """Where the last driver listened; 0 where nobody knows."""
    try:
        return int(json.loads((folder / "address.json").read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Of a nested configuration: each value by its dotted key."""
    if not isinstance(section, dict) or (prefix and not section):
        return {prefix: section}
    return {
        name: value
        for key, inner in section.items()
        for name, value in flat(inner, f"{prefix}.{key}" if prefix else key).items()
    }
