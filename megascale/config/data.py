"""`[data]`: what a run reads, one prepared folder or several in stated shares, and how its samples
are cut from it (MegaScale 3.4 reads it; `docs/data.md` shows how to use the keys).
"""

from __future__ import annotations

import math
import os
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megascale.config.base import Section

MOST_AHEAD = 63  # of a node's loader: `data/node/shape.py` has room for a slot more


class MixturePart(Section):
    """A prepared folder of a mixture: `[[data.mixture]]` in a recipe, a table each."""

    path: str = Field(min_length=1, description="prepared folder")
    weight: float = Field(
        gt=0.0, description="its share of the samples; shares need not sum to 1, their sum is 1"
    )

    @field_validator("weight", mode="before")
    @classmethod
    def _is_a_share(cls, weight: Any) -> Any:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            return weight  # of another type: told as everywhere
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(
                f"got {weight}, legal: a finite number above 0, the data set's share beside the "
                "others'; give one, or leave the data set out of data.mixture"
            )
        return weight


class DataConfig(Section):
    """A folder written by `megascale data prepare`, a mixture of several, or synthetic tokens for
    benchmarks."""

    path: str = Field("", description="prepared folder; empty with synthetic or a mixture")
    mixture: tuple[MixturePart, ...] = Field(
        (), description="several prepared folders with weights, in place of path"
    )
    synthetic: bool = Field(False, description="seeded random tokens, no files")
    packing: Literal["concat", "pad"] = Field(
        "concat", description="documents joined and cut, or one padded document a sample"
    )
    mask_end_of_document: bool = Field(
        False, description="no loss on predicting the token after a document's end"
    )
    document_mask: bool = Field(
        False,
        description="tokens attend to their own document alone, positions start with it, and the "
        "first token of the next one has no loss; packing concat",
    )
    prefetch: int = Field(2, ge=0, description="global batches read ahead")
    loader: Literal["auto", "node", "rank"] = Field(
        "auto",
        description="who reads: one process a node, whose ranks copy from its memory, or each rank "
        "for itself; auto: one a node where a node has several ranks and prefetch is at least 1",
    )

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.mixture and (self.path or self.synthetic):
            other = f"data.path {self.path!r}" if self.path else "data.synthetic = true"
            raise ValueError(
                f"data.mixture names {len(self.mixture)} data sets and {other} is set too; a run "
                "reads one or the other: add the folder to data.mixture, or leave one of them out"
            )
        seen: dict[str, str] = {}
        for part in self.mixture:
            place = os.path.normpath(part.path)
            if place in seen:
                raise ValueError(
                    f"data.mixture names {part.path!r} twice (as {seen[place]!r} before); give it "
                    "once, with the sum of the weights"
                )
            seen[place] = part.path
        return self

    @model_validator(mode="after")
    def _a_node_reads_ahead(self) -> DataConfig:
        if self.loader == "node" and not 1 <= self.prefetch <= MOST_AHEAD:
            raise ValueError(
                f"data.loader is node with data.prefetch {self.prefetch}; a node's loader reads 1 "
                f"to {MOST_AHEAD} global batches ahead: set data.prefetch to one of these, or "
                "data.loader to rank"
            )
        return self

    @model_validator(mode="after")
    def _documents_share_samples(self) -> DataConfig:
        if self.document_mask and self.synthetic:
            raise ValueError(
                "data.document_mask is true with data.synthetic: random tokens are of no document; "
                "set one of them to false"
            )
        if self.document_mask and self.packing != "concat":
            raise ValueError(
                f"data.document_mask is true with data.packing {self.packing!r}, where a sample is "
                "one document already; legal with the mask: 'concat': set it, or leave the mask out"
            )
        return self

    @property
    def folders(self) -> tuple[str, ...]:
        """The prepared folders, in order; `("",)` where none is named."""
        return tuple(part.path for part in self.mixture) or (self.path,)
