"""The tuning cache: classes of rows, a file that round-trips, and files that are none."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from megascale.errors import FluxError
from megascale.flux.problem import Problem
from megascale.flux.settings import Settings
from megascale.flux.tuning_cache import FORMAT, Choice, Key, TuningCache, m_class

PROBLEM = Problem("ag_gemm", 100, 24576, 12288, 2, torch.bfloat16, "NK")
KEY = Key.of(PROBLEM)
CHOICE = Choice("fused", {"block_m": 128, "stages": 3}, {"fused(block_m=128)": 1.5, "nccl": 2.0})


def test_classes_of_rows_are_powers_of_two_named_by_their_largest_member() -> None:
    classes = [m_class(m) for m in (1, 2, 7, 8, 9, 16, 17, 512, 513, 1000, 16384, 16385)]
    assert classes == [1, 8, 8, 8, 16, 16, 32, 512, 1024, 1024, 16384, 32768]
    assert all(m <= m_class(m) < max(9, 2 * m) for m in range(1, 3000))


def test_a_key_is_the_class_of_the_problem() -> None:
    assert Key.of(Problem("ag_gemm", 128, 24576, 12288, 2, torch.bfloat16, "NK")) == KEY
    assert KEY.problem == Problem("ag_gemm", 128, 24576, 12288, 2, torch.bfloat16, "NK")
    assert (KEY.device_name, KEY.torch_version) == ("cpu", torch.__version__)
    others = [
        Key.of(PROBLEM, "graph"),
        Key.of(PROBLEM, num_columns=2 * 24576),
        Key.of(Problem("ag_gemm", 200, 24576, 12288, 2, torch.bfloat16, "NK")),
        Key.of(Problem("ag_gemm", 100, 24576, 12288, 4, torch.bfloat16, "NK")),
        Key.of(Problem("ag_gemm", 100, 24576, 12288, 2, torch.float16, "NK")),
        Key.of(Problem("ag_gemm", 100, 24576, 12288, 2, torch.bfloat16, "KN")),
        Key.of(Problem("gemm_rs", 100, 24576, 12288, 2, torch.bfloat16, "NK")),
    ]
    assert len({KEY, *others}) == 8


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "tuned.json"
    cache = TuningCache.load(path)
    assert cache.get(KEY) is None
    cache.put(KEY, CHOICE)
    cache.put(Key.of(PROBLEM, "graph"), Choice("nccl"))
    cache.save()
    again = TuningCache.load(path)
    assert len(again) == 2
    assert again.get(KEY) == CHOICE
    assert again.get(Key.of(PROBLEM, "graph")) == Choice("nccl", None, {})
    assert [p.name for p in path.parent.iterdir()] == ["tuned.json"], "no temporary file stays"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_form_on_request_makes_a_class_of_its_own(tmp_path: Path) -> None:
    path, asked = tmp_path / "tuned.json", Key.of(PROBLEM, asked="in_flight")
    cache = TuningCache(path)
    cache.put(asked, Choice("in_flight"))
    cache.put(KEY, CHOICE)
    cache.save()
    keys = [entry["key"] for entry in json.loads(path.read_text())["entries"]]
    assert sorted(key.get("asked", "nothing") for key in keys) == ["in_flight", "nothing"]
    again = TuningCache.load(path)
    assert again.get(asked) == Choice("in_flight")
    assert again.get(KEY) == CHOICE


def test_saving_keeps_what_others_added_meanwhile_and_own_measurements_win(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    mine, other = TuningCache.load(path), TuningCache.load(path)
    other.put(KEY, Choice("chunked"))
    other.put(Key.of(PROBLEM, "graph"), Choice("plain"))
    other.save()
    mine.put(KEY, CHOICE)
    mine.save()
    again = TuningCache.load(path)
    assert again.get(KEY) == CHOICE
    assert again.get(Key.of(PROBLEM, "graph")) == Choice("plain")
    other.save()  # holds an older KEY, but measured it itself
    assert TuningCache.load(path).get(KEY) == Choice("chunked")


def test_a_cache_without_a_file_saves_nothing() -> None:
    cache = TuningCache()
    cache.put(KEY, CHOICE)
    cache.save()
    assert cache.get(KEY) == CHOICE


def _entry(**changes: object) -> dict[str, object]:
    cache_key = {name: getattr(KEY, name) for name in KEY.__dataclass_fields__}
    return {"key": {**cache_key, **changes}, "form": "fused", "config": None, "ms": {}}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"format": 1, "entr', "is not JSON (Unterminated string"),
        ("[]", "has format None and this program reads 1"),
        ('{"format": 0, "entries": []}', "has format 0 and this program reads 1"),
        ('{"format": 99, "entries": []}', "has format 99 and this program reads 1"),
        ('{"format": 1}', "has an entry that is none (KeyError: 'entries')"),
        (
            json.dumps({"format": FORMAT, "entries": [{"key": {}, "form": "fused"}]}),
            "has an entry that is none (KeyError: 'op')",
        ),
        (
            json.dumps({"format": FORMAT, "entries": [_entry(n="many")]}),
            "has an entry that is none (TypeError: n is 'many')",
        ),
        ("\xff\xfe", "is not JSON"),
    ],
)
def test_a_file_that_is_none_is_said_ignored_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, complaint: str
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        cache = TuningCache.load(path)
    assert len(cache) == 0
    assert f"tuning cache {path} {complaint}" in caplog.text
    assert "follow the default rule until they are tuned again" in caplog.text
    cache.put(KEY, CHOICE)
    cache.save()
    assert TuningCache.load(path).get(KEY) == CHOICE
    assert (tmp_path / "tuned.json.unreadable").read_text(encoding="latin-1") == content


def test_a_missing_file_is_no_complaint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(TuningCache.load(tmp_path / "none.json")) == 0
    assert caplog.text == ""


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file" / "tuned.json")
    cache.put(KEY, CHOICE)
    with pytest.raises(FluxError, match=r"cannot be written .* give the path of a file"):
        cache.save()


def test_a_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine").write_text("kept")
    cache = TuningCache.load(tmp_path / "cache")
    cache.put(KEY, CHOICE)
    with pytest.raises(FluxError, match="it is there, and no file"):
        cache.save()
    assert (tmp_path / "cache" / "mine").read_text() == "kept"


def test_files_that_were_moved_aside_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    for text in ("first", "second"):
        path.write_text(text)
        cache = TuningCache.load(path)
        cache.put(KEY, CHOICE)
        cache.save()
    kept = sorted(p.read_text() for p in tmp_path.glob("*.unreadable*"))
    assert kept == ["first", "second"]


@pytest.mark.parametrize("ms", ["[]", "null", '{"plain": 1' + "0" * 400 + "}", "[" * 100_000])
def test_a_file_of_any_content_is_read_without_an_error(ms: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    cache = TuningCache(path)
    cache.put(KEY, CHOICE)
    cache.save()
    text = path.read_text()
    start = text.index('"ms": ') + len('"ms": ')
    path.write_text(text[:start] + ms + text[text.index("}", start) + 1 :])
    assert len(TuningCache.load(path)) == 0


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(FluxError, match="cache is"):
        Settings(cache=path)
