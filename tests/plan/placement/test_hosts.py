"""Lists of nodes as Slurm writes them."""

from __future__ import annotations

import pytest

from megascale.errors import ConfigError
from megascale.plan.placement.hosts import expand, natural


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node0", ["node0"]),
        ("gpu[003-005,9]-a,cpu1", ["gpu003-a", "gpu004-a", "gpu005-a", "gpu9-a", "cpu1"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("a, b", ["a", "b"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_lists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["", "gpu[1-", "gpu[a-b]", "gpu[]", "gpu 1", ","])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a list of names; legal: names and ranges"):
        expand(text)


def test_a_range_that_runs_backwards() -> None:
    with pytest.raises(ConfigError, match="the range 9-3 runs backwards; write 3-9"):
        expand("gpu[9-3]")


@pytest.mark.parametrize("text", ["gpu[0-999999999]", "gpu[1-600000,1-600000]"])
def test_a_list_that_would_fill_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="legal are 1,000,000 in one list"):
        expand(text)


def test_natural_order() -> None:
    assert sorted(["n10", "n2", "m1"], key=natural) == ["m1", "n2", "n10"]
