"""Write the tables of `docs/configuration.md` from the configuration classes themselves.

The classes own names, types, bounds, defaults and descriptions; the page repeats nothing by hand.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from megascale.config import PRESETS, ModelConfig, RunConfig
from megascale.config.base import Section
from tools.blocks import ROOT, main

PAGE = ROOT / "docs" / "configuration.md"


def sections() -> dict[str, type[Section]]:
    """Every section by its path, nested ones (`training.batch_ramp_up`) after their owner."""
    found: dict[str, type[Section]] = {}

    def visit(path: str, section: type[Section]) -> None:
        found[path] = section
        for name, field in section.model_fields.items():
            for inner in _section_types(field.annotation):
                visit(f"{path}.{name}", inner)

    for name, field in RunConfig.model_fields.items():
        for section in _section_types(field.annotation):
            visit(name, section)
    return found


def render(spec: str) -> str:
    """The block `sections` (a heading and a table each) or `presets` (one table)."""
    if spec == "presets":
        return _render_presets()
    assert spec == "sections", f"blocks are `sections` and `presets`, got {spec!r}"
    return "\n" + "\n".join(_render_section(*item) for item in sections().items())


def _render_presets() -> str:
    shape = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size")
    columns = (*shape, "vocab_size")
    lines = ["", f"| preset | {' | '.join(f'`{key}`' for key in columns)} | and |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for name, values in PRESETS.items():
        defaults = {key: field.default for key, field in ModelConfig.model_fields.items()}
        rest = [
            f"{key} {_preset_value(value)}"
            for key, value in values.items()
            if key not in columns and value != defaults[key]
        ]
        cells = [str(values.get(key, "")) for key in columns]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {', '.join(rest)} |")
    return "\n".join([*lines, "", ""])


def _preset_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {inner}" for key, inner in value.items()) + "}"
    return _toml(value).strip('"')


def _render_section(path: str, section: type[Section]) -> str:
    lines = [f"## `[{path}]`", ""]
    lines += [" ".join((section.__doc__ or "").split()), ""]
    lines += ["| key | type | default | |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        note = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {note} |")
    return "\n".join([*lines, ""])


def _section_types(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _section_types(part)]


def _type(field: FieldInfo) -> str:
    text = _type_name(field.annotation)
    bounds = {annotated_types.Ge: ">=", annotated_types.Gt: ">", annotated_types.Le: "<="}
    bounds[annotated_types.Lt] = "<"
    for kind, sign in bounds.items():
        for bound in field.metadata:
            if isinstance(bound, kind):
                text += f" {sign} {getattr(bound, kind.__name__.lower()):g}"
    return text


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_name(p) for p in get_args(annotation) if p is not NoneType)
    if _section_types(annotation):
        return "list of sections" if get_origin(annotation) is tuple else "section"
    return str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, Section):
        return "its defaults"
    return "none" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    """`value` as a recipe writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    main([PAGE], "reference", render)
