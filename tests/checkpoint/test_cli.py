"""`megascale checkpoint`: what it prints, its exit codes, and bad input of each verb."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascale import cli
from megascale.checkpoint import load_checkpoint, save_checkpoint
from megascale.checkpoint.manifest import MANIFEST, MARK, list_checkpoints, read_manifest
from tests.checkpoint.layouts import empty, reference, whole
from tests.storage.s3_server import S3Server, s3_server

FILE = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


class Ran:
    def __init__(self, code: int, out: str, error: str) -> None:
        self.code, self.out, self.error = code, out, error


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["megascale", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        found = capsys.readouterr()
        return Ran(int(ended.value.code or 0), found.out, found.err)

    return call


def save(root: Path, *steps: int) -> list[Path]:
    pieces = [whole(key, tensor) for key, tensor in reference().items()]
    return [save_checkpoint(root, step, pieces, {"seed": 7}) for step in steps]


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def set_format(checkpoint: Path, number: int) -> None:
    """As another version of megascale would have written it."""
    content = json.loads((checkpoint / MANIFEST).read_bytes())
    data = json.dumps({**content, "format": number}).encode()
    (checkpoint / MANIFEST).write_bytes(data)
    mark = json.loads((checkpoint / MARK).read_bytes())
    mark["manifest_sha256"] = hashlib.sha256(data).hexdigest()
    (checkpoint / MARK).write_text(json.dumps(mark))


def test_ls_tells_each_state(tmp_path: Path, run: Any) -> None:
    root = tmp_path / "checkpoints"
    paths = save(root, 10, 20, 30, 40, 50, 25)
    set_format(paths[0], 9)
    set_format(paths[1], 1)
    (paths[2] / MARK).unlink()
    (paths[3] / FILE).write_bytes(b"short")
    for name in (MARK, MANIFEST):
        (paths[4] / name).unlink()
    rows = json.loads(run("ls", tmp_path, "--json").out)
    assert [(row["name"], row["step"], row["number"], row["state"]) for row in rows] == [
        ("step-00000025", 25, 6, "committed"),
        ("step-00000040", 40, 4, "damaged"),
        ("step-00000020", 20, 2, "older format"),
        ("step-00000010", 10, 1, "newer format"),
        ("step-00000030", 30, None, "damaged"),
        ("step-00000050", 50, None, "interrupted"),
    ]
    newest = rows[0]
    assert newest["path"] == str(paths[5])
    assert newest["num_files"] == 3
    assert newest["num_bytes"] == sum(file.stat().st_size for file in paths[5].iterdir())
    assert newest["time"].startswith("20")
    assert newest["problem"] == ""
    assert "5 bytes" in rows[1]["problem"]
    assert rows[3]["problem"] == "format 9, this version reads 2"
    lines = run("ls", root).out.splitlines()
    assert " ".join(lines[0].split()) == "name step number time (UTC) bytes files state"
    assert lines[1].split()[:3] == ["step-00000025", "25", "6"]
    assert lines[4].endswith("newer format: format 9, this version reads 2")


@pytest.mark.parametrize("verb", ["ls", "verify", "prune", "convert"])
def test_a_place_without_checkpoints_is_said_by_each_verb(
    tmp_path: Path, run: Any, verb: str
) -> None:
    (tmp_path / "notes.txt").write_text("none")
    needed: dict[str, list[object]] = {"prune": ["--keep", 1], "convert": [tmp_path / "out"]}
    more = needed.get(verb, [])
    ran = run(verb, tmp_path, *more)
    assert ran.code == 4
    assert f"{tmp_path} holds no checkpoints (it holds notes.txt...); give a run" in ran.error
    ran = run(verb, tmp_path / "missing", *more)
    assert ran.code == 4
    assert "empty or not there" in ran.error
    ran = run(verb, "s4://bucket/run", *more)
    assert ran.code == 2
    assert "nobody knows the protocol 's4'" in ran.error


@pytest.mark.parametrize("verb", ["ls", "prune"])
def test_one_checkpoint_is_no_root(tmp_path: Path, run: Any, verb: str) -> None:
    (path,) = save(tmp_path, 10)
    ran = run(verb, path, *(["--keep", 1] if verb == "prune" else []))
    assert ran.code == 4
    assert "is one checkpoint; give the folder that it lies in" in ran.error


def test_verify_hashes_all_and_its_exit_code_says(tmp_path: Path, run: Any) -> None:
    paths = save(tmp_path, 10, 20)
    ran = run("verify", tmp_path)
    assert ran.code == 0
    assert [line.split(":")[0] for line in ran.out.splitlines()] == [str(p) for p in paths[::-1]]
    assert "good" in ran.out
    flip(paths[0] / FILE)
    ran = run("verify", *paths)
    assert ran.code == 4
    first, second = ran.out.splitlines()
    assert first.startswith(f"{paths[0]}: NOT GOOD: ")
    assert "is damaged: bytes 4,096 to" in first
    assert second.startswith(f"{paths[1]}: good")
    rows = json.loads(run("verify", *paths, "--json").out)
    assert [(row["good"], row["step"]) for row in rows] == [(False, 10), (True, 20)]
    assert rows[1]["num_bytes"] == (paths[1] / FILE).stat().st_size


def test_verify_tells_a_header_a_size_a_mark_and_a_format(tmp_path: Path, run: Any) -> None:
    paths = save(tmp_path, 10, 20, 30, 40)
    flip(paths[0] / FILE, 20)
    (paths[1] / FILE).unlink()
    (paths[2] / MARK).unlink()
    set_format(paths[3], 3)
    ran = run("verify", *paths)
    assert ran.code == 4
    said = [
        "is damaged: bytes 0 to 4,096",
        "is missing",
        f"{MARK} is missing",
        "format 3 of a newer",
    ]
    for line, expected in zip(ran.out.splitlines(), said, strict=True):
        assert expected in line
    ran = run("verify", tmp_path / "step-00000099")
    assert ran.code == 4
    assert "no checkpoint at" in ran.error


def test_prune_keeps_the_last_and_says_first_what_would_go(tmp_path: Path, run: Any) -> None:
    paths = save(tmp_path, 10, 20, 30)
    leftover = tmp_path / "step-00000005"
    leftover.mkdir()
    told = run("prune", tmp_path, "--keep", 2, "--dry-run").out.splitlines()
    assert told == [f"would remove {paths[0]}", f"would remove {leftover}"]
    assert leftover.exists()
    assert run("prune", tmp_path, "--keep", 2).out.splitlines() == [
        f"removed {paths[0]}",
        f"removed {leftover}",
    ]
    assert list_checkpoints(tmp_path).committed == [paths[2], paths[1]]
    assert run("prune", tmp_path, "--keep", 2).out == "nothing to remove\n"
    assert run("prune", tmp_path, "--keep", 0).code == 2
    assert list_checkpoints(tmp_path).committed == [paths[2], paths[1]]


def test_prune_never_removes_the_last_good_one(tmp_path: Path, run: Any) -> None:
    paths = save(tmp_path, 10, 20, 30)
    flip(paths[2] / FILE)
    told = run("prune", tmp_path, "--keep", 1, "--dry-run").out
    assert told == f"would remove {paths[0]}\n"
    run("prune", tmp_path, "--keep", 1)
    assert list_checkpoints(tmp_path).committed == [paths[2], paths[1]]


def test_a_copy_in_another_folder_loads_bitwise(tmp_path: Path, run: Any) -> None:
    paths = save(tmp_path / "here", 10, 20)
    there = tmp_path / "there"
    ran = run("convert", tmp_path / "here", there)
    assert ran.out == f"{paths[1]} -> {there / paths[1].name}, verified\n"
    run("convert", paths[0], there)
    run("convert", paths[0], there)
    assert [path.name for path in list_checkpoints(there).committed] == [
        "step-00000010.1",
        "step-00000010",
        "step-00000020",
    ]
    assert_is_reference(there / "step-00000010.1")
    assert read_manifest(there / "step-00000010.1") == read_manifest(paths[0])


@pytest.mark.full
def test_a_checkpoint_goes_to_s3_and_back(tmp_path: Path, run: Any, s3: S3Server) -> None:
    (path,) = save(tmp_path / "here", 10)
    url = f"{s3.new_bucket()}/run"
    ran = run("convert", path, url)
    assert ran.out == f"{path} -> {url}/step-00000010, verified\n"
    (row,) = json.loads(run("ls", url, "--json").out)
    assert (row["state"], row["number"], row["step"]) == ("committed", 1, 10)
    assert row["num_bytes"] == sum(file.stat().st_size for file in path.iterdir())
    assert run("verify", f"{url}/step-00000010").code == 0
    back = tmp_path / "back"
    run("convert", url, back)
    assert_is_reference(back / "step-00000010")
    assert run("prune", url, "--keep", 1).out == "nothing to remove\n"


def assert_is_reference(checkpoint: Path) -> None:
    tensors = empty()
    load_checkpoint(checkpoint, [whole(key, tensor) for key, tensor in tensors.items()])
    for key, tensor in reference().items():
        assert torch.equal(tensors[key], tensor), key


def test_a_damaged_source_is_not_copied(tmp_path: Path, run: Any) -> None:
    (path,) = save(tmp_path / "here", 10)
    flip(path / FILE)
    ran = run("convert", path, tmp_path / "there")
    assert ran.code == 4
    assert "is not what its manifest vouches for; copy another checkpoint" in ran.error
    assert not any((tmp_path / "there").iterdir())


def test_whole_tensors_as_safetensors(tmp_path: Path, run: Any) -> None:
    (path,) = save(tmp_path / "here", 10)
    masters, everything = tmp_path / "masters", tmp_path / "all"
    ran = run("convert", path, masters, "--to", "safetensors")
    assert ran.out == f"{path} -> {masters}: 3 whole tensors\n"
    run("convert", path, everything, "--to", "safetensors", "--state", "all")
    expected = reference()
    found = load_file(everything / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    found = load_file(masters / "model.safetensors")
    assert {f"master/{key}" for key in found} == {
        key for key in expected if key.startswith("master/")
    }
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[f"master/{key}"]), key
    meta = json.loads((masters / "config.json").read_text())["megascale"]
    assert meta == {"seed": 7, "step": 10}


def test_safetensors_refuse_what_is_there_what_is_no_folder_and_what_is_damaged(
    tmp_path: Path, run: Any
) -> None:
    (path,) = save(tmp_path / "here", 10)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    ran = run("convert", path, tmp_path / "taken", "--to", "safetensors")
    assert ran.code == 4
    assert "exists and is not empty" in ran.error
    ran = run("convert", path, "s3://bucket/out", "--to", "safetensors")
    assert ran.code == 2
    assert "writes a folder of this machine, s3://bucket/out is a URL" in ran.error
    assert run("convert", path, tmp_path / "out", "--to", "gguf").code == 2
    flip(path / FILE)
    ran = run("convert", path, tmp_path / "out", "--to", "safetensors", "--state", "all")
    assert ran.code == 4
    assert not (tmp_path / "out").exists()
