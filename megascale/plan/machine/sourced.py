"""The base of every section of a cluster file: no number without the place it comes from.

A planner is as good as its numbers, and a number loses its origin first. So each section says in
`source` where its numbers come from, in one sentence for all or key by key ("*" for the rest), and
each sentence begins with what kind of number it is.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from megascale.config.base import Section

KINDS = ("measured", "fitted", "data sheet", "published", "assumed")


class Sourced(Section):
    """A section whose numbers each have a source."""

    source: str | dict[str, str] = Field(
        description="where the numbers come from: one sentence, or one by key, '*' for the rest"
    )

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> Self:
        table = {"*": self.source} if isinstance(self.source, str) else self.source
        for key, text in table.items():
            if not text.startswith(KINDS):
                raise ValueError(
                    f"the source of {key!r} is {text!r}; begin with one of: {', '.join(KINDS)}"
                )
        numbers = [
            name
            for name in self.model_fields_set
            if isinstance(getattr(self, name), int | float) and name != "source"
        ]
        bare = sorted(set(numbers) - set(table))
        if bare and "*" not in table:
            raise ValueError(
                f"{', '.join(bare)}: no source; say in `source` where the number comes from, "
                f"beginning with one of: {', '.join(KINDS)}"
            )
        unknown = sorted(set(table) - set(type(self).model_fields) - {"*"})
        if unknown:
            raise ValueError(
                f"a source for {unknown[0]!r}, which is no key of this section; legal: "
                f"{', '.join(name for name in type(self).model_fields if name != 'source')}, '*'"
            )
        return self

    def source_of(self, key: str) -> str:
        """What the file says about the number `key`."""
        if isinstance(self.source, str):
            return self.source
        return self.source.get(key, self.source.get("*", "a default of the program"))
