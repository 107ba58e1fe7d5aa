"""Cluster files: TOML by name (the catalogue) or by path.

A section may be the name of another cluster file instead of a table (`device = "a100"`): it is then
that file's section, so that nothing is written twice.
"""

from __future__ import annotations

import difflib
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megascale.errors import ConfigError
from megascale.plan.machine.cluster import Cluster

CATALOGUE = ("h200", "h100", "a100", "paper")
DEFAULT_CLUSTER = "h200"
_BOUNDS = {"ge": "", "le": "", "gt": "a number above ", "lt": "a number below "}
SHARED = ("device", "nvlink", "network", "fabric", "overlap", "samples")


def load_cluster(name_or_path: str, num_devices: int | None = None) -> Cluster:
    """The cluster of that name or file, with `num_devices` of its devices. ConfigError if bad."""
    tables = cluster_tables_of(name_or_path)
    if num_devices is not None:
        tables = _resized(tables, num_devices)
    return cluster_from(tables, name_or_path)


def cluster_tables_of(name_or_path: str) -> dict[str, Any]:
    """The file's tables, those of other files that it names in their places; not yet checked."""
    return _tables(name_or_path, None, ())


def cluster_from(tables: dict[str, Any], name: str) -> Cluster:
    """Check tables; `name` is for the message. Raises ConfigError with every problem."""
    try:
        return Cluster.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(_render(name, error)) from None


def _resized(tables: dict[str, Any], num_devices: int) -> dict[str, Any]:
    """With as many devices; fewer than a node has are a smaller node."""
    limit = tables.get("most_devices") or tables.get("num_devices")
    per_node = tables.get("devices_per_node")
    if num_devices < 1 or (isinstance(limit, int) and num_devices > limit):
        raise ConfigError(
            f"cluster {tables.get('name')!r} has {limit} devices, {num_devices} were asked for; "
            f"ask for 1 to {limit}, or raise most_devices in a copy of its file"
        )
    tables = {**tables, "num_devices": num_devices}
    if isinstance(per_node, int) and num_devices < per_node:
        tables = {**tables, "devices_per_node": num_devices}
        if isinstance(tables.get("network"), dict) and isinstance(limit, int):
            tables["most_devices"] = num_devices
    return tables


def _tables(name_or_path: str, beside: Path | None, seen: tuple[str, ...]) -> dict[str, Any]:
    """The file's tables, sections that name another file replaced by that file's."""
    text, place = _text_of(name_or_path, beside)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cluster file {name_or_path} does not parse: {error}") from None
    for section in SHARED:
        other = tables.get(section)
        if not isinstance(other, str):
            continue
        if other in (name_or_path, *seen):
            raise ConfigError(f"{name_or_path}: {section} = {other!r} leads back to itself")
        theirs = _tables(other, place, (*seen, name_or_path))
        if section not in theirs:
            raise ConfigError(f"{name_or_path}: {section} = {other!r}, which has no [{section}]")
        tables[section] = theirs[section]
    return tables


def _text_of(name_or_path: str, beside: Path | None) -> tuple[str, Path | None]:
    """Text, and the folder in which it names others (None: the catalogue)."""
    if name_or_path in CATALOGUE:
        folder = files("megascale.plan.machine").joinpath("catalogue")
        return folder.joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8"), None
    path = Path(name_or_path)
    if beside is not None and not path.is_absolute():
        path = beside / path
    if not path.is_file():
        near = difflib.get_close_matches(name_or_path, CATALOGUE, n=1, cutoff=0.4)
        hint = f"known names: {', '.join(CATALOGUE)}"
        hint += f" (nearest: {near[0]!r})" if near else ""
        raise ConfigError(
            f"cluster {name_or_path!r} is neither a file nor a known name; {hint}; "
            "`megascale calibrate FILE` writes one for this machine"
        )
    try:
        return path.read_text(encoding="utf-8"), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster file {path} cannot be read: {error}") from None


def _render(name: str, error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        got = problem.get("input")
        bounds = [f"{_BOUNDS[k]}{v:g}" for k, v in problem.get("ctx", {}).items() if k in _BOUNDS]
        if problem["type"] == "missing":
            message = "missing; give it (the files of the catalogue show how)"
        elif problem["type"] == "model_type":
            message = f"got {got!r}, legal: a table, or the name of a cluster file that has it"
        elif problem["type"] != "value_error" and not isinstance(got, dict):
            message = f"{message}, got {got!r}"
        if bounds:
            message = f"{message}; nearest legal: {bounds[0]}"
        lines.append(f"{where}: {message}" if where else message)
    return f"cluster {name!r} is refused:\n" + "\n".join(lines)
