"""What readers share: options of a question, numbers as JSON, who the ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megascale.errors import DataError
from megascale.telemetry.readers.answer import Window

if TYPE_CHECKING:
    from megascale.telemetry.store.run import Run

Integers = NDArray[np.int64]


def number_option(window: Window, name: str, default: int, *, least: int = 1) -> int:
    """An option of the question. DataError: it is no whole number, or too small."""
    given = window.options.get(name)
    if given is None:
        return default
    try:
        value = int(given)
    except ValueError:
        value = least - 1
    if value < least:
        raise DataError(f"option {name} is {given!r}; legal: a whole number of at least {least}")
    return value


def numbers(values: Iterable[Any], digits: int = 4) -> list[float | None]:
    """Floats for JSON: NaN and infinity become None."""
    array = np.asarray(list(values), dtype=np.float64)
    rounded = np.round(array, digits).astype(object)
    rounded[~np.isfinite(array)] = None
    return list(rounded)


def asked(rank_R: Integers, window: Window) -> NDArray[np.bool_]:
    """Which of the ranks are asked about. DataError: none of them."""
    if window.ranks is None:
        return np.ones(len(rank_R), bool)
    found: NDArray[np.bool_] = np.isin(rank_R, list(window.ranks))
    if not found.any():
        raise DataError(
            f"ranks {list(window.ranks)[:8]} were asked for; recorded are "
            f"{int(rank_R.min())} to {int(rank_R.max())}"
        )
    return found


def hosts(run: Run) -> dict[int, str]:
    """The host of each rank."""
    return dict(zip(run.places.rank_R.tolist(), run.places.host_R, strict=True))


def host_list(run: Run, rank_R: Integers) -> Sequence[str]:
    of = hosts(run)
    return [of.get(int(rank), "") for rank in rank_R]


def stages(run: Run, rank_R: Integers) -> Integers:
    """Pipeline stage of each rank."""
    return rank_R // (run.mesh.tensor * run.mesh.data)


def settings(run: Run, section: str) -> dict[str, Any]:
    """A section of the run's configuration; empty where there is none."""
    found = (run.config or {}).get(section)
    return found if isinstance(found, dict) else {}
