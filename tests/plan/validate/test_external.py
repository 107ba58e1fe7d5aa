"""Rows of a CSV as cases; what is wrong with one is said with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.errors import ConfigError
from megascale.plan.validate.external import NEEDED, read_external
from megascale.plan.validate.machines import load_machines

ROW = {
    "system": "Megatron-DeepSpeed (vTrain real)",
    "model": "GPT-39.1B",
    "layers": "48",
    "hidden": "8192",
    "heads": "64",
    "vocab": "51200 (assumed)",
    "seq": "2048",
    "gpu": "A100 (memory size not stated)",
    "n_gpus": "512",
    "tp": "8",
    "pp": "4",
    "dp": "16",
    "mbs": "3",
    "gbs": "1536",
    "recompute": "full",
    "precision": "",
    "iter_s": "14.8",
    "source": "vTrain",
}


def _written(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "rows.csv"
    lines = [",".join(NEEDED), *(",".join(row[name] for name in NEEDED) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_row_becomes_a_case_on_four_nics_a_node(tmp_path: Path) -> None:
    found = read_external(_written(tmp_path, ROW), load_machines())
    (row,) = found.of("vtrain")
    assert (row.case.layout.tensor, row.case.layout.pipeline, row.case.layout.data) == (8, 4, 16)
    assert row.case.micro_batches == 32
    assert row.case.job.model.vocab == 51200
    assert row.cluster.network is not None
    assert row.cluster.network.nics_per_node == 4
    assert not row.case.software.sequence_parallel


def test_rows_of_other_sets_are_counted_and_left_out(tmp_path: Path) -> None:
    other = ROW | {"system": "GPT-NeoX", "source": "a paper"}
    silent = ROW | {"iter_s": ""}
    eight_bits = ROW | {"system": "MosaicML llm-foundry", "precision": "amp_fp8", "source": ""}
    found = read_external(_written(tmp_path, other, silent, eight_bits), load_machines())
    assert not found.rows
    assert sum(found.left_out.values()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_gpus": "256"}, "n_gpus says 256"),
        ({"gbs": "1000"}, "not a multiple"),
        ({"hidden": "wide"}, "hidden is 'wide'"),
        ({"recompute": "some"}, "legal: none, selective, full"),
    ],
)
def test_a_bad_row_is_named_by_its_line(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    path = _written(tmp_path, ROW, ROW | changes)
    with pytest.raises(ConfigError, match=rf"line 3: .*{message}"):
        read_external(path, load_machines())


def test_a_file_without_the_columns_says_which(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("system,model\na,b\n")
    with pytest.raises(ConfigError, match=r"columns layers, hidden.* are missing"):
        read_external(path, load_machines())
    with pytest.raises(ConfigError, match="cannot be read"):
        read_external(tmp_path / "none.csv", load_machines())
