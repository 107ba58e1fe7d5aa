"""Export is what `transformers` computes and generates; import gives back the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.checkpoint import HfFolder, Piece, write_hf_folder
from megascale.checkpoint.saved_model import open_saved_model
from megascale.config import ModelConfig, RopeScaling
from megascale.errors import CheckpointError, ConfigError
from megascale.model.context import make_context
from megascale.model.initialise import logical_tensors
from megascale.model.transformer import TransformerChunk
from megascale.serve.generate import generate_text
from megascale.train.convert import export_to_hf, hf_master_pieces_loader, import_from_hf
from megascale.train.run_folder import RunFolder
from tests.checkpoint.layouts import LOADS, Layout
from tests.distributed import run_ranks
from tests.model.builders import build, random_tokens, tiny
from tests.serve.saved_runs import POSITIONS, save_run, tokenizer
from tests.train.command import train_here

PRESETS = ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3", "tiny-gpt"]
THEIR_SIZES = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48},
}


def _cfg(preset: str, **changes: Any) -> ModelConfig:
    changes = {"max_seq_len": POSITIONS, "vocab_size": tokenizer().vocab_size, **changes}
    return tiny(preset, **changes)


def _exported(tmp_path: Path, cfg: ModelConfig, dtype: str = "float32") -> TransformerChunk:
    """A model with values, its run in `run`, its export in `hf`."""
    model = build(cfg, POSITIONS, torch.float32)
    save_run(tmp_path / "run", cfg, model)
    assert "wrote" in export_to_hf(tmp_path / "run", tmp_path / "hf", dtype=dtype)
    return model


def _greedy_text(run: Path, prompt: str, num_tokens: int) -> str:
    return generate_text(run, prompt, max_new_tokens=num_tokens, temperature=0.0, top_k=0, seed=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_transformers_computes_and_generates_the_same(tmp_path: Path, preset: str) -> None:
    transformers = pytest.importorskip("transformers")
    cfg = _cfg(preset)
    model = _exported(tmp_path, cfg)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    ).eval()
    tokens = random_tokens(cfg, 2, 40)
    with torch.no_grad():
        logits = model(tokens.flatten(), make_context(2, 40)).view(2, 40, -1)
        expected = theirs(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    prompt = "def add(first"
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = their_tokenizer(prompt, return_tensors="pt")
    assert ids["input_ids"][0].tolist() == tokenizer().encode(prompt)
    assert theirs.config.eos_token_id == tokenizer().end_of_document_id
    continued = theirs.generate(**ids, max_new_tokens=24, do_sample=False)[0]
    assert len(continued) > ids["input_ids"].shape[1] + 8
    text = _greedy_text(tmp_path / "run", prompt, 24)
    assert text == their_tokenizer.decode(continued, skip_special_tokens=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_export_and_import_give_the_same_bits(tmp_path: Path, preset: str) -> None:
    cfg = _cfg(preset)
    model = _exported(tmp_path, cfg)
    assert "checkpoint.initial_load_path" in import_from_hf(tmp_path / "hf", tmp_path / "back")
    saved = open_saved_model(tmp_path / "back")
    assert (saved.checkpoint.name, saved.num_positions) == ("step-00000000", POSITIONS)
    for name, values in logical_tensors(model).items():
        assert torch.equal(saved.parameter(name), values), name
    back = RunFolder(tmp_path / "back")
    assert back.load_config().model == saved.model
    assert back.tokenizer_file.read_bytes() == tokenizer().tokenizer_json
    texts = [_greedy_text(tmp_path / run, "def", 8) for run in ("run", "back")]
    assert texts[0] == texts[1]


def test_the_dtype_of_an_export_is_kept_by_its_import(tmp_path: Path) -> None:
    cfg = _cfg("tiny-gpt")
    model = _exported(tmp_path, cfg, "bfloat16")
    folder = HfFolder(tmp_path / "hf")
    assert {folder.read(name).dtype for name in folder.names()} == {torch.bfloat16}
    assert folder.config["torch_dtype"] == "bfloat16"
    import_from_hf(tmp_path / "hf", tmp_path / "back")
    saved = open_saved_model(tmp_path / "back")
    for name, values in logical_tensors(model).items():
        assert torch.equal(saved.parameter(name), values.bfloat16()), name


@pytest.mark.parametrize("family", THEIR_SIZES)
def test_a_model_that_transformers_saved(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, vocab_size=96, **THEIR_SIZES[family])
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=20_000)
    import_from_hf(tmp_path / "hf", tmp_path / "run")
    saved = open_saved_model(tmp_path / "run")
    model = build(saved.model, saved.num_positions, torch.float32)
    for name, storage in logical_tensors(model).items():
        storage.copy_(saved.parameter(name))
    tokens = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens.flatten(), make_context(2, 20)).view(2, 20, -1)
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def _masters(cfg: ModelConfig, fill: float | None = None) -> dict[str, Tensor]:
    logical = logical_tensors(build(cfg, POSITIONS, torch.float32))
    return {
        f"master/{name}": values if fill is None else torch.full_like(values, fill)
        for name, values in logical.items()
    }


@pytest.mark.parametrize("layout", LOADS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-qwen2"])
def test_any_layout_is_filled_from_a_folder(tmp_path: Path, preset: str, layout: Layout) -> None:
    cfg = _cfg(preset)
    _exported(tmp_path, cfg)
    expected, live = _masters(cfg), _masters(cfg, fill=-1.0)
    for rank in range(3):
        hf_master_pieces_loader(tmp_path / "hf", layout(rank, 3, live), cfg)
    for key, values in expected.items():
        assert torch.equal(live[key], values), key


def _load(rank: int, world_size: int, folder: str, cfg: ModelConfig) -> str:
    import torch.distributed as dist

    try:
        hf_master_pieces_loader(Path(folder), [], cfg, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_of_another_model_is_refused_by_all_ranks(tmp_path: Path) -> None:
    cfg = _cfg("tiny-gpt")
    _exported(tmp_path, cfg)
    pieces: list[Piece] = LOADS[0](0, 1, _masters(cfg))
    other = cfg.model_copy(update={"num_layers": 3})
    with pytest.raises(CheckpointError, match=r"model.num_layers is 2 there and 3 here"):
        hf_master_pieces_loader(tmp_path / "hf", pieces, other)
    eps = cfg.model_copy(update={"norm_eps": 1e-3})
    with pytest.raises(CheckpointError, match=r"model.norm_eps is 1e-05 there and 0.001 here"):
        hf_master_pieces_loader(tmp_path / "hf", pieces, eps)
    assert all("there and 3" in m for m in run_ranks(_load, 2, str(tmp_path / "hf"), other))
    short = build(cfg, POSITIONS // 2)
    pieces = LOADS[0](0, 1, {f"master/{k}": v for k, v in logical_tensors(short).items()})
    with pytest.raises(CheckpointError, match=r"set model.max_seq_len = 64"):
        hf_master_pieces_loader(tmp_path / "hf", pieces, cfg)


def test_rotary_positions_of_a_folder_are_kept_and_its_window_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = _cfg("tiny-mistral")
    _exported(tmp_path, cfg)
    pieces: list[Piece] = LOADS[0](0, 1, _masters(cfg))
    other = cfg.model_copy(update={"rope_theta": 7.0})
    with pytest.raises(CheckpointError, match=r"model.rope_theta is 10000.0 there and 7.0 here"):
        hf_master_pieces_loader(tmp_path / "hf", pieces, other)
    other = cfg.model_copy(update={"rope_scaling": RopeScaling()})
    with pytest.raises(CheckpointError, match=r"model.rope_scaling is None there and factor=8.0"):
        hf_master_pieces_loader(tmp_path / "hf", pieces, other)
    hf_master_pieces_loader(tmp_path / "hf", pieces, cfg.model_copy(update={"attention_window": 5}))
    assert "model.attention_window is 16 there and 5 here" in caplog.text


BAD_CONFIGS: dict[str, tuple[Any, str]] = {
    "kind": ({"vocab_size": "many"}, r"model\.vocab_size: got 'many', legal: a whole number"),
    "size": ({"num_hidden_layers": 0}, r"model\.num_layers: .*, got 0"),
    "rope": ({"rope_parameters": {"rope_type": "llama3"}}, r"config\.json has no 'factor'"),
    "no object": ([], r"config\.json holds no JSON object"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_does_not_read_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    _exported(tmp_path, _cfg("tiny-llama"))
    changes, message = BAD_CONFIGS[name]
    file = tmp_path / "hf" / "config.json"
    config = {**json.loads(file.read_text()), **changes} if changes else changes
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as refusal:
        import_from_hf(tmp_path / "hf", tmp_path / "back")
    assert "\n" not in str(refusal.value)
    assert "pydantic" not in str(refusal.value)


def _train(patch: pytest.MonkeyPatch, run: Path, *settings: str, resume: bool = False) -> int:
    same = [f"model.vocab_size={tokenizer().vocab_size}", "model.preset=tiny-llama", *settings]
    return train_here(patch, run, *same, more=("--resume",) if resume else ())


def test_an_imported_run_is_begun_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _exported(tmp_path, _cfg("tiny-llama"))
    import_from_hf(tmp_path / "hf", tmp_path / "back")
    assert _train(monkeypatch, tmp_path / "back", resume=True) == 4
    told = capsys.readouterr().err
    assert "holds weights only, no optimizer state" in told
    assert "start a new one with --set checkpoint.initial_load_path=" in told


def test_a_folder_is_loaded_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _exported(tmp_path, _cfg("tiny-llama"))
    given = f"checkpoint.initial_load_path={tmp_path / 'hf'}"
    assert _train(monkeypatch, tmp_path / "new", given) == 4
    assert "set checkpoint.initial_load_in_hf = true" in capsys.readouterr().err
    assert _train(monkeypatch, tmp_path / "new", "checkpoint.initial_load_in_hf=true") == 2
    assert "checkpoint.initial_load_path" in capsys.readouterr().err


def test_exports_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    output = tmp_path / "hf"
    parallel = _cfg("tiny-llama", block="parallel")
    save_run(tmp_path / "parallel", parallel, build(parallel, POSITIONS))
    with pytest.raises(ConfigError, match=r"model\.block = 'parallel'"):
        export_to_hf(tmp_path / "parallel", output, dtype="float32")
    with pytest.raises(ConfigError, match="legal: float32, bfloat16, float16"):
        export_to_hf(tmp_path / "parallel", output, dtype="int8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is neither a run folder"):
        export_to_hf(tmp_path / "empty", output, dtype="float32")
    cfg = _cfg("tiny-llama")
    save_run(tmp_path / "short", cfg, build(cfg.model_copy(update={"num_layers": 1}), POSITIONS))
    with pytest.raises(CheckpointError, match=r"has no tensor 'master/layers.1"):
        export_to_hf(tmp_path / "short", output, dtype="float32")
    assert not output.exists()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_to_hf(tmp_path / "short", tmp_path / "short", dtype="float32")


def test_imports_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    _exported(tmp_path, _cfg("tiny-llama"))
    folder, output = tmp_path / "hf", tmp_path / "back"
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        import_from_hf(folder, tmp_path / "run")
    stored = HfFolder(folder)
    tensors = {name: stored.read(name).clone() for name in stored.names()}
    foreign = {**stored.config, "model_type": "mamba"}
    write_hf_folder(tmp_path / "foreign", tensors.items(), foreign)
    with pytest.raises(CheckpointError, match="model_type 'mamba'; legal: llama"):
        import_from_hf(tmp_path / "foreign", output)
    odd = {**stored.config, "num_attention_heads": 5}
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(odd))
    with pytest.raises(CheckpointError, match="num_heads 5 is not a multiple"):
        import_from_hf(tmp_path / "foreign", output)
    del tensors["model.norm.weight"]
    write_hf_folder(tmp_path / "missing", tensors.items(), stored.config)
    with pytest.raises(CheckpointError, match=r"1 missing \(model.norm.weight\)"):
        import_from_hf(tmp_path / "missing", output)
    assert not output.exists()
