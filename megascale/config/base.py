"""The base of every configuration section: frozen, closed, strict about types, and helpful when a
key is misspelt."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from megascale.config.value_types import check_type


class Section(BaseModel):
    """A section of the run configuration. Unknown keys are refused with the nearest valid name."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        legal = list(cls.model_fields)
        for key in values:
            if key in legal:
                continue
            near = difflib.get_close_matches(str(key), legal, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"legal keys: {', '.join(legal)}"
            raise ValueError(f"unknown key {key!r}; {hint}")
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "validates fields"
        check_type(value, cls.model_fields[info.field_name])
        return value
