"""Read a TOML recipe, apply `--set section.key=value`, turn failures into one readable error."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megascale.config.run import RunConfig
from megascale.errors import ConfigError


def load_config(recipe: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of `recipe` (TOML or a run's config.json; None: all defaults)
    with `overrides` ("a.b=c") applied. Raises ConfigError with every problem found, one a line."""
    values = _read(Path(recipe)) if recipe is not None else {}
    for override in overrides:
        _apply(values, override)
    return parse_config(values)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with `overrides` ("a.b=c") applied, checked anew."""
    values = config.model_dump(mode="json")
    for override in overrides:
        _apply(values, override)
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> RunConfig:
    """Check a nested dictionary of sections."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_render(error)) from None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"recipe {path} {problem}; give a TOML file, see recipes/")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} does not parse: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {path} holds a {type(values).__name__}, not sections of keys")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or len(keys) < 2 or not all(keys):
        raise ConfigError(
            f"--set {override!r} is not section.key=value; "
            "for example --set parallelism.tensor_parallel_size=2"
        )
    if keys[0] not in RunConfig.model_fields:
        near = difflib.get_close_matches(keys[0], RunConfig.model_fields, n=1, cutoff=0.5)
        legal = ", ".join(RunConfig.model_fields)
        hint = f"did you mean {near[0]!r}?" if near else f"legal sections: {legal}"
        raise ConfigError(f"--set {override!r}: unknown section {keys[0]!r}; {hint}")
    section = values
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override!r}: {key!r} holds a value, not a section")
    section[keys[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value; what does not parse as one is a plain string, so quotes are not needed."""
    if text == "null":  # TOML has no such value; "none" is a legal word of some keys
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _render(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        got = problem.get("input")
        if problem["type"] != "value_error" and not isinstance(got, dict):
            message = f"{message}, got {got!r}"
        lines.append(f"{where}: {message}" if where else message)
    return "\n".join(lines)
