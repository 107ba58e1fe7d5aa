"""Tables as TOML text, as a cluster file has them: values first, then sections, then rows of
samples, a row a line. The standard library reads TOML and does not write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(tables: Mapping[str, Any]) -> str:
    """`tomllib.loads` of the text gives `tables` again; None is left out."""
    return "\n".join(_section(tables, "")).strip() + "\n"


def _section(table: Mapping[str, Any], path: str) -> list[str]:
    present = {key: value for key, value in table.items() if value is not None}
    lines = []
    for key, value in present.items():
        if isinstance(value, list | tuple):
            rows = "".join(f"    {_value(row)},\n" for row in value)
            lines.append(f"{_key(key)} = [\n{rows}]")
        elif not isinstance(value, Mapping):
            lines.append(f"{_key(key)} = {_value(value)}")
    if path and (lines or not present):
        lines = ["", f"[{path}]", *lines]
    for key, value in present.items():
        if isinstance(value, Mapping):
            lines += _section(value, f"{path}.{_key(key)}" if path else _key(key))
    return lines


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    assert isinstance(value, str), (type(value), value)
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)
