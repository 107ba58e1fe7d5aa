"""A folder that holds a run: nothing continues it by accident, or as another run than it is.

What was saved is never changed by a refusal.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megascale.checkpoint.manifest import list_checkpoints
from megascale.data import prepare
from tests.train.command import train_here, tree
from tests.train.runs import metrics

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on synthetic tokens; do not change it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert train_here(patch, run) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_run_in_a_folder_is_refused(
    run: Path, monkeypatch: Patch, capsys: Capture, ranks: int
) -> None:
    before = tree(run)
    assert train_here(monkeypatch, run, more=("--nproc", str(ranks))) == 2
    message = f"{run} already holds a run; continue it with --resume, or start a new one"
    assert message in capsys.readouterr().err
    assert tree(run) == before


OTHER_RUNS = {
    "seed": (["training.seed=7"], "was trained with training.seed 1234, this run has 7"),
    "seq_len": (["training.seq_len=8"], "was trained with training.seq_len 16, this run has 8"),
    "width": (["model.hidden_size=64"], "model.hidden_size is 32 there and 64 here"),
    "layers": (["model.num_layers=3"], "model.num_layers is 2 there and 3 here"),
    "packing": (["data.packing=pad"], "was trained with data.packing 'concat', this run has 'pad'"),
    "mask": (
        ["data.mask_end_of_document=true"],
        "was trained with data.mask_end_of_document False, this run has True",
    ),
    "rope_theta": (
        ["model.rope_theta=500000.0"],
        "model.rope_theta is 10000.0 there and 500000.0 here",
    ),
    "rope_scaling": (["model.rope_scaling={factor=4.0}"], "model.rope_scaling is None there and"),
    "norm_eps": (["model.norm_eps=1e-6"], "model.norm_eps is 1e-05 there and 1e-06 here"),
    "window": (["model.attention_window=4"], "model.attention_window is None there and 4 here"),
    "tying": (["model.tie_embeddings=true"], "model.tie_embeddings is False there and True here"),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_resuming_another_run_is_refused(
    run: Path, monkeypatch: Patch, capsys: Capture, name: str
) -> None:
    settings, message = OTHER_RUNS[name]
    config, saved = (run / "config.json").read_text(), tree(run / "checkpoints")
    assert train_here(monkeypatch, run, *settings, more=("--resume",)) == 4
    assert message in capsys.readouterr().err
    assert (run / "config.json").read_text() == config
    assert tree(run / "checkpoints") == saved


def test_weights_of_another_model_are_refused(
    run: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = [f"checkpoint.initial_load_path={run}", "model.ffn_hidden_size=128"]
    assert train_here(monkeypatch, tmp_path / "new", *settings) == 4
    assert "model.ffn_hidden_size is 64 there and 128 here" in capsys.readouterr().err
    assert not (tmp_path / "new" / "config.json").exists()  # the folder can be used
    assert train_here(monkeypatch, tmp_path / "new", settings[0], "model.norm_eps=0.1") == 4
    assert "model.norm_eps is 1e-05 there and 0.1 here" in capsys.readouterr().err
    anew = ["model.hidden_dropout=0.1", "model.attention_window=4"]
    assert train_here(monkeypatch, tmp_path / "new", settings[0], *anew) == 0
    assert "model.hidden_dropout is 0.0 there and 0.1 here" in caplog.text
    assert "model.attention_window is None there and 4 here" in caplog.text


def test_other_text_or_tokenizer_is_noticed_on_resume(
    tmp_path: Path, prepared: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def on(data: Path, *more: str) -> list[str]:
        return ["data.synthetic=false", f"data.path={data}", "model.vocab_size=280", *more]

    run, text = tmp_path / "run", tmp_path / "text"
    assert train_here(monkeypatch, run, *on(prepared)) == 0
    text.write_text("other words than those before\n" * 300)
    texts, tokens = tmp_path / "same-tokenizer", tmp_path / "other-tokenizer"
    prepare([str(text)], str(prepared), texts, workers=1, validation_fraction=0.0)
    prepare([str(text)], "train:BPE:280", tokens, workers=1, validation_fraction=0.0)
    for other in (texts, tokens):
        assert train_here(monkeypatch, run, *on(other), more=("--resume",)) == 4
        assert "was trained with data of documents" in capsys.readouterr().err
    # the same data elsewhere is the same
    moved = Path(
        shutil.copytree(prepared, tmp_path / "moved")
    )  # the same data elsewhere is the same
    meta = json.loads((moved / "meta.json").read_text())
    (moved / "meta.json").write_text(json.dumps({**meta, "command": "another"}))
    again = on(moved, "training.steps=3")
    assert train_here(monkeypatch, run, *again, more=("--resume",)) == 0

    split = tmp_path / "other-split"
    source = str(prepared.parent / "*.txt")
    prepare([source], str(prepared), split, workers=1, validation_fraction=0.1)
    assert train_here(monkeypatch, run, *on(split), more=("--resume",)) == 4
    assert "was trained with data of split" in capsys.readouterr().err

    weights = f"checkpoint.initial_load_path={run}"
    assert train_here(monkeypatch, tmp_path / "new", *on(tokens, weights)) == 4
    assert "was trained with tokenizer" in capsys.readouterr().err
    assert train_here(monkeypatch, tmp_path / "new", *on(texts, weights)) == 0


def test_no_new_start_beside_damaged_checkpoints(
    run: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (checkpoint,) = list_checkpoints(run / "checkpoints")[0]
    os.truncate(checkpoint / "rank-00000.safetensors", 900)
    saved = tree(run / "checkpoints")
    assert train_here(monkeypatch, run, more=("--resume",)) == 4
    assert "none of the 1 checkpoints in" in capsys.readouterr().err
    assert tree(run / "checkpoints") == saved


@pytest.mark.parametrize("mark", [None, "xx\n"])
def test_no_new_start_beside_a_checkpoint_whose_mark_is_lost(
    run: Path, monkeypatch: Patch, capsys: Capture, mark: str | None
) -> None:
    (checkpoint,) = list_checkpoints(run / "checkpoints").committed
    (checkpoint / "COMMITTED").unlink()
    if mark is not None:
        (checkpoint / "COMMITTED").write_text(mark)
    saved = tree(run / "checkpoints")
    assert train_here(monkeypatch, run, more=("--resume",)) == 4
    assert "none of the 1 checkpoints in" in capsys.readouterr().err
    assert tree(run / "checkpoints") == saved


@pytest.mark.parametrize("record", ["as written", "damaged"])
def test_no_new_start_where_the_checkpoints_vanished(
    run: Path, monkeypatch: Patch, capsys: Capture, record: str
) -> None:
    shutil.rmtree(run / "checkpoints")
    if record == "damaged":
        (run / "last_checkpoint.json").write_text("{")
    before = metrics(run)
    assert train_here(monkeypatch, run, more=("--resume",)) == 4
    told = "this run saved step 2, but" if record == "as written" else "is damaged, so this run"
    assert told in capsys.readouterr().err
    assert metrics(run) == before


def test_killed_before_its_first_checkpoint_a_run_starts_anew(
    run: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "last_checkpoint.json").unlink()
    assert train_here(monkeypatch, run, more=("--resume",)) == 0
    assert "no committed checkpoint in" in caplog.text
    assert [line["step"] for line in metrics(run)] == [1, 2, 1, 2]
