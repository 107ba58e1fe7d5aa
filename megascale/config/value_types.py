"""Which type of value a key takes, strictly: pydantic alone would read `true` as 1, "8" as 8 and 1
as true, and a run would start with a number that nobody wrote.

A whole number is a legal float; nothing else is converted. Bounds and choices are pydantic's.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_EXAMPLES = {int: 8, float: 0.5, bool: True, str: "text"}
_SIGNS = {
    annotated_types.Ge: ">=",
    annotated_types.Gt: ">",
    annotated_types.Le: "<=",
    annotated_types.Lt: "<",
}


def check_type(value: Any, field: FieldInfo) -> None:
    """Raises ValueError where `value` is of no type that the field is annotated with.

    Fields that hold a section are left to pydantic.
    """
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    legal = {type(choice) for choice in choices} or _types(field.annotation)
    if not legal <= {*_WORDS, NoneType}:
        return
    if type(value) in legal or (type(value) is int and float in legal):
        return
    if choices:
        words = [_shown(choice) for choice in choices]
    else:
        words = [_WORDS[kind] + _bounds(field) for kind in _WORDS if kind in legal]
        words += ["null"] if NoneType in legal else []
    raise ValueError(
        f"got {_shown(value)}, legal: {' or '.join(words)}; {_advice(value, legal, field)}"
    )


def _types(annotation: Any) -> set[Any]:
    """Those of a union, or the one type."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return set(get_args(annotation)) if is_union else {annotation}


def _bounds(field: FieldInfo) -> str:
    found = [
        f"{_SIGNS[type(bound)]} {getattr(bound, type(bound).__name__.lower()):g}"
        for bound in field.metadata
        if type(bound) in _SIGNS
    ]
    return f" {' and '.join(found)}" if found else ""


def _advice(value: Any, legal: set[Any], field: FieldInfo) -> str:
    if str in legal and isinstance(value, int | float):
        return f'text that looks like a value needs quotes: "{_shown(value)}"'
    kinds = [kind for kind in _WORDS if kind in legal]
    default = field.default
    example = default if type(default) in kinds else _EXAMPLES[kinds[0]]
    return f"give one, such as {_shown(example)}"


def _shown(value: Any) -> str:
    """Near to how a recipe writes it."""
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)
