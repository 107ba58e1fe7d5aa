"""Preparation: the same folder from any number of workers, whole or not at all, and true counts."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest

from megascale.data import encode, sources
from megascale.data.corpus import cross_entropy_nats
from megascale.data.encode import SplitRule, document_digest
from megascale.data.indexed import IndexedTokens, IndexedWriter
from megascale.data.inputs.documents import Task
from megascale.data.prepare import Progress, prepare, prepare_with_progress
from megascale.data.prepared import Meta
from megascale.data.tokenizer import load_tokenizer
from megascale.errors import DataError

_SPEC = "train:BPE:300"
_TEXTS = [f"def function_{i}(x):\n    return x + {i * i}  # naïve\n" * 3 for i in range(60)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files, a `.jsonl`, a file that is not UTF-8 and an empty one."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i, text in enumerate(_TEXTS[:40]):
        (folder / f"{i:02}.py").write_text(text)
    lines = (json.dumps({"text": text}) for text in _TEXTS[40:])
    (folder / "more.jsonl").write_text("\n".join(lines))
    (folder / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "empty.txt").write_bytes(b"")
    return folder


def _stored_texts(output: Path) -> list[str]:
    tokenizer = load_tokenizer(output)
    texts = []
    for split in ("train", "valid"):
        file = IndexedTokens(output / split)
        for i in range(file.num_documents):
            *tokens, end = file.document(i).tolist()
            assert end == tokenizer.end_of_document_id
            texts.append(tokenizer.decode(tokens))
    return texts


def test_text_survives_and_is_counted(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "prepared"
    meta = prepare([str(corpus)], _SPEC, output, workers=1, validation_fraction=0.2)
    assert sorted(_stored_texts(output)) == sorted(_TEXTS)
    assert (meta.skipped_undecodable, meta.skipped_empty, meta.source_files) == (1, 1, 43)
    assert Meta.read(output) == meta
    for name, split in meta.splits.items():
        file = IndexedTokens(output / name)
        assert (file.num_tokens, file.num_documents) == (split.tokens, split.documents)
    assert meta.tokenizer_sha256 == load_tokenizer(output).fingerprint
    assert f"--input {corpus} --tokenizer {_SPEC} --output {output}" in meta.command
    assert sorted(p.name for p in output.iterdir()) == [
        "meta.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.bin",
        "train.idx",
        "valid.bin",
        "valid.idx",
    ]


def test_entropies_equal_a_direct_computation(corpus: Path, tmp_path: Path) -> None:
    meta = prepare([str(corpus)], _SPEC, tmp_path / "o", workers=1, validation_fraction=0.3)
    train = Counter(IndexedTokens(tmp_path / "o" / "train").tokens.tolist())
    valid = IndexedTokens(tmp_path / "o" / "valid").tokens.tolist()
    total = sum(train.values())
    entropy = -sum(n / total * log(n / total) for n in train.values())
    smoothed = [log((train[t] + 1) / (total + meta.vocab_size)) for t in valid]
    assert meta.unigram_entropy_nats == pytest.approx(entropy, rel=1e-12)
    assert meta.valid_unigram_cross_entropy_nats == pytest.approx(
        -sum(smoothed) / len(valid), rel=1e-12
    )


def test_cross_entropy_without_tokens_is_unknown() -> None:
    assert cross_entropy_nats(np.zeros(3, np.int64), np.ones(3, np.int64)) is None


def test_workers_do_not_change_the_result(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", 700)  # some twenty tasks
    one, two = tmp_path / "one", tmp_path / "two"
    prepare([str(corpus)], _SPEC, one, workers=1, validation_fraction=0.2)
    prepare([str(corpus)], _SPEC, two, workers=2, validation_fraction=0.2)
    for path in one.iterdir():
        if path.name != "meta.json":
            assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    first, second = (json.loads((o / "meta.json").read_text()) for o in (one, two))
    assert first.pop("command") != second.pop("command")
    assert first == second


def test_progress_ends_at_the_total(corpus: Path, tmp_path: Path) -> None:
    steps: list[Progress] = []
    meta = prepare(
        [str(corpus)], _SPEC, tmp_path / "o", workers=1, validation_fraction=0.2,
        progress=steps.append,
    )  # fmt: skip
    last = {step.phase: step for step in steps}
    assert list(last) == ["tokenizer", "encode"]
    assert all(step.done_bytes == step.total_bytes for step in last.values())
    assert last["encode"].tokens == sum(split.tokens for split in meta.splits.values())


def test_summary_for_people(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_with_progress([str(corpus)], _SPEC, tmp_path / "o", workers=1, validation_fraction=0.2)
    printed = capsys.readouterr().out
    meta = Meta.read(tmp_path / "o")
    assert f"train: {meta.splits['train'].tokens:,} tokens in " in printed
    assert f"unigram entropy {meta.unigram_entropy_nats:.3f} nats" in printed
    assert "skipped: 1 empty, 1 not UTF-8" in printed


def test_the_split_is_a_function_of_the_text() -> None:
    rule, wider = SplitRule(0.1, seed=3), SplitRule(0.3, seed=3)
    texts = [f"text {i}" for i in range(4000)]
    held_out = {text for text in texts if rule.split(text) == "valid"}
    assert 330 < len(held_out) < 470
    assert held_out < {text for text in texts if wider.split(text) == "valid"}
    other_seed = {text for text in texts if SplitRule(0.1, seed=4).split(text) == "valid"}
    assert len(held_out & other_seed) < 80


def test_nothing_held_out_makes_one_split(corpus: Path, tmp_path: Path) -> None:
    meta = prepare([str(corpus)], _SPEC, tmp_path / "o", workers=1, validation_fraction=0.0)
    assert list(meta.splits) == ["train"]
    assert meta.valid_unigram_cross_entropy_nats is None
    assert not (tmp_path / "o" / "valid.bin").exists()


def test_a_ready_tokenizer_is_kept_byte_for_byte(corpus: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], _SPEC, tmp_path / "a", workers=1, validation_fraction=0.2)
    meta = prepare(
        [str(corpus)], str(tmp_path / "a"), tmp_path / "b", workers=1, validation_fraction=0.2
    )
    for name in ("tokenizer.json", "train.bin", "train.idx", "valid.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert meta.documents_sha256 == Meta.read(tmp_path / "a").documents_sha256


def _refused(match: str, inputs: list[str], output: Path, **options: float) -> None:
    before = sorted(output.parent.iterdir())
    with pytest.raises(DataError, match=match):
        prepare(inputs, _SPEC, output, workers=1, **options)  # type: ignore[arg-type]
    assert sorted(output.parent.iterdir()) == before, "something was left behind"


def test_refusals_leave_nothing(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    _refused("not in", [str(corpus)], output, validation_fraction=1.0)
    _refused("matches no file", [str(tmp_path / "absent")], output)
    _refused("holds no text .1 documents are not", [str(corpus / "latin1.txt")], output)
    _refused("holds no text .0 documents .*1 are empty", [str(corpus / "empty.txt")], output)
    _refused("with 1 documents; give more", [str(corpus / "00.py")], output)
    (corpus / "broken.jsonl").write_text("{")
    _refused(r"broken\.jsonl at byte 0", [str(corpus)], output)


def test_at_least_one_of_several_documents_is_held_out(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "o"
    meta = prepare([str(corpus)], _SPEC, output, workers=1, validation_fraction=1e-6)
    assert "none of the 60 documents is held out at validation fraction 1e-06" in caplog.text
    assert (meta.splits["train"].documents, meta.splits["valid"].documents) == (59, 1)
    rule = SplitRule(1e-6, seed=0)
    chosen = min(_TEXTS, key=lambda text: rule.draw(document_digest(text)))
    assert _stored_texts(output)[-1] == chosen
    assert sorted(_stored_texts(output)) == sorted(_TEXTS)
    assert meta.validation_fraction == 1e-6  # the command that it tells gives the same folder
    again = tmp_path / "again"  # and its vocabulary is that of a fraction which does so by itself
    fraction = rule.draw(document_digest(chosen)) + 1e-9
    prepare([str(corpus)], _SPEC, again, workers=1, validation_fraction=fraction)
    for name in ("tokenizer.json", "train.bin", "valid.bin"):
        assert (output / name).read_bytes() == (again / name).read_bytes(), name


def test_two_documents_are_enough(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"the words of {name}\n" * 20)
    meta = prepare([str(tmp_path / "*.txt")], "train:BPE:280", tmp_path / "o", workers=1)
    assert [meta.splits[name].documents for name in ("train", "valid")] == [1, 1]


def test_an_output_with_content_is_refused_and_kept(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    output.mkdir()
    prepare([str(corpus)], _SPEC, output, workers=1, validation_fraction=0.2)  # empty: fine
    before = {path: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(DataError, match="exists and is not an empty folder"):
        prepare([str(corpus)], _SPEC, output, workers=1)
    assert {path: path.read_bytes() for path in output.iterdir()} == before


def test_a_full_disk_leaves_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexedWriter, "add", full)
    _refused("No space left on device; nothing was left", [str(corpus)], tmp_path / "o")


def _die(task: Task) -> None:
    os._exit(1)


def test_a_dead_worker_is_reported(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", 700)
    monkeypatch.setattr(encode, "_encode", _die)
    with pytest.raises(DataError, match="a worker process died"):
        prepare([str(corpus)], _SPEC, tmp_path / "o", workers=2)
    assert list(tmp_path.iterdir()) == [corpus]


_STUCK = """
import multiprocessing, sys, time
from pathlib import Path
from megascale.data import sources
from megascale.data.prepare import prepare

def wait_at_the_first_tokens(step):
    if step.phase == "encode":
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(600)

if __name__ == "__main__":
    sources._SEGMENT_BYTES = 700
    prepare([sys.argv[1]], "train:BPE:300", Path(sys.argv[2]), workers=2,
            validation_fraction=0.2, progress=wait_at_the_first_tokens)
"""


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_killed_run_leaves_no_output_and_no_workers(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(_STUCK)
    output = tmp_path / "out" / "o"
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(script), str(corpus), str(output)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as run:
        assert run.stdout is not None
        workers = [int(pid) for pid in run.stdout.readline().split()]
        run.send_signal(signal.SIGKILL)
    assert len(workers) == 2
    assert not output.exists()
    deadline = time.monotonic() + 10
    while any(map(_is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_is_running, workers)), "workers outlived their parent"
    assert len(list(output.parent.iterdir())) == 1  # what it had written, under another name
    prepare([str(corpus)], _SPEC, output, workers=1, validation_fraction=0.2)
    assert list(output.parent.iterdir()) == [output]


def test_the_package_needs_no_torch() -> None:
    code = "import sys, megascale.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
