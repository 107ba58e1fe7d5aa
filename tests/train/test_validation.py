"""Held-out loss of a mixture: each part's own samples, and the whole by exact shares."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megascale.config import load_config
from megascale.data import Mixture, PackedDataset
from megascale.data.opening import open_order
from megascale.topology import Coordinates, Mesh
from megascale.train.assemble import assemble
from megascale.train.validation import HeldOut, held_out, validate
from tests.distributed import run_ranks
from tests.shared import shared_folder
from tests.train.harness import TINY
from tests.train.test_mixture import setting, write_parts

SEQ_LEN, BATCH = 16, 4
ALONE = Mesh(1, 1, 1), Coordinates(0, 0, 0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "mixture-parts", write_parts)


def _settings(*data: str) -> list[str]:
    return [
        *TINY,
        "data.synthetic=false",
        "model.vocab_size=280",
        f"training.seq_len={SEQ_LEN}",
        f"training.global_batch_size={BATCH}",
        "validation.batches=5",
        "training.dtype=float64",
        *data,
    ]


def _tokens(part: HeldOut) -> list[list[int]]:
    return [
        tokens.tolist()
        for batch in part.batches
        for micro_batch in batch.micro_batches
        for tokens in micro_batch.tokens_BS
    ]


def test_each_part_is_read_from_its_own_split_by_its_share(parts: Path) -> None:
    folders = [parts / "prose", parts / "code"]
    config = load_config(None, _settings(setting((folders[0], 0.79), (folders[1], 0.21))))
    found = held_out(config, *ALONE)
    assert [(part.name, part.share) for part in found] == [("prose", 0.79), ("code", 0.21)]
    assert [len(list(part.batches)) for part in found] == [4, 1]
    order = open_order(config, "valid")
    assert isinstance(order, Mixture)
    for folder, part, shuffled in zip(folders, found, order.parts, strict=True):
        own = PackedDataset(folder, "valid", SEQ_LEN)
        expected = [own[shuffled.index(n)] for n in range(len(list(part.batches)) * BATCH)]
        assert _tokens(part) == [sample.tokens_S.tolist() for sample in expected]


def test_a_part_of_a_small_share_has_a_batch(parts: Path) -> None:
    data = setting((parts / "prose", 0.999), (parts / "code", 0.001))
    assert [len(list(p.batches)) for p in held_out(load_config(None, _settings(data)), *ALONE)] == [
        5,
        1,
    ]


def test_folders_of_one_name_are_told_by_their_paths(parts: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(parts / "code", tmp_path / "prose"))
    config = load_config(None, _settings(setting((parts / "prose", 1), (other, 1))))
    names = [part.name for part in held_out(config, *ALONE)]
    assert names == [str(parts / "prose"), str(other)]


def test_one_data_set_is_the_whole(parts: Path) -> None:
    (part,) = held_out(load_config(None, _settings(f'data.path="{parts / "code"}"')), *ALONE)
    assert (part.name, part.share, len(list(part.batches))) == ("", 1.0, 5)


def _losses(rank: int, world_size: int, settings: list[str]) -> tuple[float, dict[str, float]]:
    config = load_config(None, settings)
    mesh = config.mesh(world_size)
    assembly = assemble(config, mesh, torch.device("cpu"))
    return validate(assembly, held_out(config, mesh, assembly.groups.coordinates))


def test_the_whole_is_the_parts_by_their_shares_in_every_layout(parts: Path) -> None:
    mixed = _settings(setting((parts / "prose", 3), (parts / "code", 1)))
    ((whole, of_parts),) = run_ranks(_losses, 1, mixed)
    assert list(of_parts) == ["prose", "code"]
    assert whole == pytest.approx(0.75 * of_parts["prose"] + 0.25 * of_parts["code"], rel=1e-12)
    assert abs(of_parts["prose"] - of_parts["code"]) > 1e-3
    for layout in ("parallelism.tensor_parallel_size=2", "parallelism.data_parallel_size=2"):
        for loss, by_part in run_ranks(_losses, 2, [*mixed, layout]):
            assert loss == pytest.approx(whole, rel=1e-12)
            assert by_part == pytest.approx(of_parts, rel=1e-12)
    ((alone, none),) = run_ranks(_losses, 1, _settings(f'data.path="{parts / "code"}"'))
    assert none == {}
    assert alone == pytest.approx(of_parts["code"], rel=0.05)  # other samples of the same text
