"""`expected.toml`: limits of the host, tolerances, and speeds by device name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError


@dataclass(frozen=True)
class Expected:
    """tolerance, host: by name; devices: kind of device to class of speed to value"""

    tolerance: Mapping[str, float]
    host: Mapping[str, float]
    devices: Mapping[str, Mapping[str, float]]

    def speed(self, kind: str, speed_class: str) -> float | None:
        return self.devices.get(kind, {}).get(speed_class)


def load_expected(path: Path | None = None) -> Expected:
    """The package's table, with the file `path` over it. ConfigError for what it cannot say."""
    own = files("megascale.cluster.selfcheck").joinpath("expected.toml").read_text()
    table = tomllib.loads(own)
    if path is not None:
        _lay_over(table, _read(path), path)
    return Expected(table["tolerance"], table["host"], table["devices"])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); see --expected") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


def _lay_over(table: dict[str, Any], given: Mapping[str, Any], path: Path) -> None:
    for section, entries in given.items():
        if section not in table or not isinstance(entries, dict):
            raise ConfigError(f"{path} has {section!r}; legal sections: {', '.join(table)}")
        for key, value in entries.items():
            place = f"{section}.{key}"
            if section == "devices":
                if not isinstance(value, dict):
                    raise ConfigError(f'{path}: {place} is {value!r}; write [devices."{key}"]')
                for name, speed in value.items():
                    _check_number(speed, f"{place}.{name}", path)
                table[section].setdefault(key, {}).update(value)
                continue
            if key not in table[section]:
                legal = ", ".join(table[section])
                raise ConfigError(f"{path}: {place} is not known; legal in {section}: {legal}")
            _check_number(value, place, path)
            if section == "tolerance" and not 0 < value < 1:
                raise ConfigError(f"{path}: {place} is {value}; it must lie between 0 and 1")
            table[section][key] = value


def _check_number(value: object, place: str, path: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{path}: {place} is {value!r}; it must be a number above 0")
