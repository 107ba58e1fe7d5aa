"""Generation equals a full pass a token, and ends where it must. `transformers`: test_convert."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.config import ModelConfig
from megascale.errors import CheckpointError, ConfigError, DataError
from megascale.model.context import make_context
from megascale.serve.generate import generate_text, generate_tokens
from megascale.serve.sampling import Sampler
from tests.model.builders import build, tiny
from tests.serve.saved_runs import POSITIONS, TEXT, save_run, tokenizer


def _cfg(preset: str = "tiny-llama", **changes: object) -> ModelConfig:
    return tiny(preset, vocab_size=tokenizer().vocab_size, **changes)


def _generate(
    run: Path,
    prompt: str,
    *,
    max_new_tokens: int = 12,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    return generate_text(
        run,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )


def _greedy() -> Sampler:
    return Sampler(0.0, 0, torch.Generator())


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-mistral"])
@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_greedy_text_equals_a_full_pass_each_token(tmp_path: Path, preset: str, block: str) -> None:
    cfg = _cfg(preset, block=block, max_seq_len=POSITIONS)
    model = build(cfg, POSITIONS, torch.float32)
    save_run(tmp_path, cfg, model)
    ids = tokenizer().encode("def add(")
    for _ in range(20):
        with torch.no_grad():
            logits = model(torch.tensor(ids), make_context(1, len(ids)))
        ids.append(int(logits[-1].argmax()))
    assert tokenizer().end_of_document_id not in ids
    assert _generate(tmp_path, "def add(", max_new_tokens=20) == tokenizer().decode(ids)


def test_a_checkpoint_generates_as_its_run_and_the_newest_counts(tmp_path: Path) -> None:
    cfg = _cfg()
    first = save_run(tmp_path, cfg, build(cfg, dtype=torch.float32), step=3)
    old = _generate(tmp_path, TEXT)
    save_run(tmp_path, cfg, build(cfg, dtype=torch.float32, seed=1), step=6)
    assert _generate(first, TEXT) == old
    assert _generate(tmp_path, TEXT) != old


def test_a_seed_gives_one_text_and_top_1_is_greedy(tmp_path: Path) -> None:
    cfg = _cfg()
    save_run(tmp_path, cfg, build(cfg, dtype=torch.float32))
    first = _generate(tmp_path, "def", temperature=1.0, seed=1)
    assert _generate(tmp_path, "def", temperature=1.0, seed=1) == first
    assert _generate(tmp_path, "def", temperature=1.0, seed=2) != first
    assert _generate(tmp_path, "def", temperature=1.0, top_k=1) == _generate(tmp_path, "def")
    assert _generate(tmp_path, "", temperature=1.0)  # begins a document


def test_stops_at_the_end_of_the_document() -> None:
    cfg = _cfg()
    model = build(cfg, dtype=torch.float32)
    tokens = list(
        generate_tokens(model, [1, 2], _greedy(), max_new_tokens=12, end_of_document_id=None)
    )
    assert len(tokens) == 12
    end = tokens[5]
    stopped = generate_tokens(model, [1, 2], _greedy(), max_new_tokens=12, end_of_document_id=end)
    assert list(stopped) == tokens[: tokens.index(end)]


def test_learned_positions_end_the_text_and_bound_the_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = _cfg("tiny-gpt")
    model = build(cfg, num_positions=8, dtype=torch.float32)

    def generate(num_prompt: int) -> list[int]:
        prompt = list(range(num_prompt))
        return list(
            generate_tokens(model, prompt, _greedy(), max_new_tokens=99, end_of_document_id=None)
        )

    assert len(generate(5)) == 4  # the last is chosen from position 8 and not fed
    assert "ended after 4 of 99 new tokens: the 8 learned positions" in caplog.text
    assert len(generate(8)) == 1
    with pytest.raises(ConfigError, match="9 tokens, the model has 8 learned positions"):
        generate(9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": os.fsdecode(b"caf\xe9")}, "not UTF-8 at character 3"),
        ({"seed": 2**64}, "values of 64 bits"),
        ({"seed": -(2**63) - 1}, "values of 64 bits"),
        ({"temperature": 1e-320}, r"temperature is 1e-320; legal are 0 .* from 0\.001 on"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
    ],
)
def test_values_that_are_not_legal(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _generate(tmp_path, **{"prompt": "def", **changes})


def test_the_ends_of_what_is_legal(tmp_path: Path) -> None:
    cfg = _cfg()
    save_run(tmp_path, cfg, build(cfg, dtype=torch.float32))
    for seed in (-(2**63), 2**64 - 1):
        text = _generate(tmp_path, "def", max_new_tokens=4, temperature=1e-3, seed=seed)
        assert text.startswith("def")


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
    sampler = Sampler(temperature=0.5, top_k=3, generator=torch.Generator().manual_seed(0))
    num_draws = 4000
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(num_draws)]), minlength=5)
    kept = torch.tensor([-torch.inf, 2.0, 1.0, -torch.inf, 1.5])
    expected = torch.softmax(kept / 0.5, dim=-1)
    torch.testing.assert_close(counts / num_draws, expected, rtol=0, atol=0.03)
    assert counts[0] == counts[3] == 0


def test_what_cannot_generate_says_why(tmp_path: Path) -> None:
    cfg = _cfg()
    save_run(tmp_path / "bare", cfg, build(cfg), with_tokenizer=False)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        _generate(tmp_path / "bare", "def")
    small = tiny("tiny-llama", vocab_size=260)
    save_run(tmp_path / "small", small, build(small))
    with pytest.raises(DataError, match=r"has 2\d\d entries, the model 260"):
        _generate(tmp_path / "small", "def")
    with pytest.raises(CheckpointError, match="is no folder"):
        _generate(tmp_path / "absent", "def")
