"""`megascale generate`: continue a prompt, the prompt in one pass, then a token a pass.

Keys and values of what was read stay in a cache, so a pass computes new positions only. The last
token is never fed: a table of P learned positions reads P tokens and writes one more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megascale.checkpoint.saved_model import SavedModel, open_saved_model
from megascale.data import TextTokenizer, load_tokenizer
from megascale.errors import CheckpointError, ConfigError, DataError
from megascale.model.cache import KeyValueCache
from megascale.model.context import make_context
from megascale.model.transformer import TransformerChunk
from megascale.serve.model import default_device, load_model
from megascale.serve.sampling import Sampler

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-3  # below, logits divided by it leave what fp32 can hold


def generate_text(
    run: Path, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """The prompt and its continuation, up to the end of the document or `max_new_tokens`.

    run  a run folder (its newest good checkpoint), or a checkpoint in one
    An empty prompt begins a document. Raises CheckpointError where nothing can be loaded,
    ConfigError where the prompt is longer than the learned positions or a value is not legal.
    """
    _check_request(prompt, temperature, seed)
    saved = open_saved_model(run)
    tokenizer = _tokenizer(saved)
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_of_document_id]
    tokens = generate_tokens(
        load_model(saved, default_device()),
        prompt_ids,
        Sampler(temperature, top_k, torch.Generator().manual_seed(seed)),
        max_new_tokens=max_new_tokens,
        end_of_document_id=tokenizer.end_of_document_id,
    )
    return tokenizer.decode([*prompt_ids, *tokens])


def generate_tokens(
    model: TransformerChunk,
    prompt_ids: Sequence[int],
    choose: Callable[[Tensor], int],
    *,
    max_new_tokens: int,
    end_of_document_id: int | None,
) -> Iterator[int]:
    """Yield tokens that follow `prompt_ids` as they are chosen; the end of document is not one.

    choose(logits_V)  the next token
    """
    num_prompt, num_positions, wanted = len(prompt_ids), model.num_positions, max_new_tokens
    if num_positions is not None:
        if num_prompt > num_positions:
            raise ConfigError(
                f"the prompt has {num_prompt} tokens, the model has {num_positions} learned "
                "positions; shorten the prompt"
            )
        max_new_tokens = min(max_new_tokens, num_positions + 1 - num_prompt)
    cache = KeyValueCache(max_len=num_prompt + max_new_tokens - 1)
    fed = list(prompt_ids)
    for _ in range(max_new_tokens):
        token = choose(_next_logits(model, fed, cache))
        if token == end_of_document_id:
            return
        yield token
        fed = [token]
    if max_new_tokens < wanted:
        logger.warning(  # to standard error
            "ended after %d of %d new tokens: the %d learned positions of the model are used up",
            max_new_tokens,
            wanted,
            num_positions,
        )


def _check_request(prompt: str, temperature: float, seed: int) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt is not UTF-8 at character {error.start}: {prompt[error.start]!r}; give it "
            "in UTF-8"
        ) from None
    if temperature != 0.0 and not MIN_TEMPERATURE <= temperature < math.inf:
        raise ConfigError(
            f"temperature is {temperature}; legal are 0 (the likeliest token always) and finite "
            f"values from {MIN_TEMPERATURE} on"
        )
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed is {seed}; legal are values of 64 bits, -2^63 to 2^64 - 1")


@torch.no_grad()
def _next_logits(model: TransformerChunk, fed: list[int], cache: KeyValueCache) -> Tensor:
    """Read `fed` behind what is in the cache; the logits of the last position, [V]."""
    device = next(model.parameters()).device
    context = make_context(1, len(fed), device, start=cache.length)
    logits_TV: Tensor = model(torch.tensor(fed, device=device), context, cache)
    return logits_TV[-1]


def _tokenizer(saved: SavedModel) -> TextTokenizer:
    if saved.tokenizer is None:
        raise CheckpointError(
            f"the run folder of {saved.checkpoint} has no tokenizer.json, so text cannot be turned "
            "into tokens; copy the one that prepared the training data there"
        )
    tokenizer = load_tokenizer(saved.tokenizer)
    if tokenizer.vocab_size > saved.model.vocab:
        raise DataError(
            f"{saved.tokenizer} has {tokenizer.vocab_size} entries, the model "
            f"{saved.model.vocab}; put the tokenizer back that prepared the training data"
        )
    return tokenizer
