"""Where a step's seconds go, in the words of a report: formula and simulation in the same ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

WORDS = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory": "passes over memory",
    "tensor": "tensor-parallel communication",
    "launch": "launches",
    "slowed": "computes slowed by communication",
    "bubble": "pipeline bubble",
    "pipeline": "stage transfers",
    "data": "data-parallel communication",
    "update": "optimizer",
    "embedding": "tied embeddings",
    "load": "loading",
    "fixed": "fixed costs",
}
"""By key of a plan's parts, in the order in which a report shows them."""

_FORMULA = {"reduce": "data", "gather": "data"}
_SIMULATION = {"transfer": "pipeline"}


def of_formula(parts: Mapping[str, float]) -> dict[str, float]:
    """From the keys of `closed_form.combine`; the sum stays."""
    return _in_words(parts, _FORMULA)


def of_simulation(parts: Mapping[str, float]) -> dict[str, float]:
    """From the fields of `simulate.StageParts`, the mean over stages; the sum stays."""
    short = {name.removesuffix("_s"): seconds for name, seconds in parts.items()}
    return _in_words(short, _SIMULATION)


def _in_words(parts: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        sums[names.get(name, name)] += seconds
    unknown = set(sums) - set(WORDS)
    assert not unknown, f"parts without a word: {unknown}"
    return {name: sums.get(name, 0.0) for name in WORDS}
