"""How sure: residuals by device, their summary by hand, and what is said where there are none."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from megascale.plan.machine.load import CATALOGUE, load_cluster
from megascale.plan.search.confidence import confidence_of, summary
from tools.residuals import render


def test_the_share_is_what_nine_of_ten_lie_within() -> None:
    errors = [-0.01, 0.02, -0.03, 0.04, 0.05, -0.06, 0.07, 0.08, -0.09, 0.30]
    found = summary(errors, [8, 16, 8, 8, 64, 8, 8, 8, 8, 8])
    assert found["share"] == 0.30, "nine of ten exactly would leave out the last"
    assert summary([*errors, 0.0], [1] * 11)["share"] == 0.09
    assert found["bias"] == pytest.approx(0.037)
    assert (found["num_rows"], found["largest"]) == (10, 64)
    assert summary([0.02], [2])["share"] == 0.02


def test_every_residual_is_of_a_device_of_the_catalogue_and_whole() -> None:
    text = files("megascale.plan.search").joinpath("residuals.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    assert found
    for values in found.values():
        assert set(values) == {"share", "bias", "num_rows", "largest", "source"}
        assert 0 < values["share"] < 1
        assert abs(values["bias"]) < values["share"]
    known = {name: confidence_of(load_cluster(name)) for name in CATALOGUE}
    assert {one.num_rows for one in known.values() if one.share is not None} == {
        values["num_rows"] for values in found.values()
    }


def test_numbers_that_nobody_compared_have_no_interval() -> None:
    cluster = load_cluster("h200", 16)
    assert confidence_of(cluster).share is not None, "another size is the same machine"
    for path, value in (("device.name", "NVIDIA B200"), ("network.nic_gb_s", 0.06)):
        found = confidence_of(cluster.changed({path: value}))
        assert found.share is None, path
        assert found.num_rows == 0
        assert "no file of the catalogue" in found.source


def test_the_file_is_what_the_tool_writes() -> None:
    text = files("megascale.plan.search").joinpath("residuals.toml").read_text(encoding="utf-8")
    assert render(tomllib.loads(text)) == text
