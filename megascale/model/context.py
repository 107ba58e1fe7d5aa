"""What a forward pass knows beside the hidden states: positions, token numbers, dropout, recompute.

Hidden states are two-dimensional, a row a token, batch-major: row t is sequence t // S, position
t % S. Under sequence parallelism a rank holds a slice of the rows; attention sees all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megascale.ops.documents import Documents
from megascale.ops.mode import OperatorMode

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of one micro-batch that every layer may need.

    seq_len           positions of each sequence in this call (S)
    positions_t       int64 position of each local row of the hidden states, in its document where
                      there are `documents`: what learned positions look up. Rotary positions stay
                      those of the sequence: a score depends on the distance of query and key alone,
                      and inside a document that is the same from either origin
    token_ids_t       int64 global token number (sample number x seq_len + position) of each local
                      row; needed for hidden dropout
    sample_numbers_B  int64 global sample numbers; needed for attention dropout
    documents         attention stays inside these; None: it sees all of the sequence before
    dropout_seed      None: no dropout (evaluation)
    operators         which implementation operators run (`ops/mode.py`)
    """

    seq_len: int
    positions_t: Tensor
    token_ids_t: Tensor | None = None
    sample_numbers_B: Tensor | None = None
    documents: Documents | None = None
    dropout_seed: int | None = None
    recompute: Recompute = "none"
    operators: OperatorMode = "fused"


def make_context(
    num_sequences: int,
    seq_len: int,
    device: torch.device | str = "cpu",
    *,
    start: int = 0,
    sample_numbers_B: Tensor | None = None,
    documents: Documents | None = None,
    dropout_seed: int | None = None,
    recompute: Recompute = "none",
    operators: OperatorMode = "fused",
) -> ForwardContext:
    """The context of whole sequences on one device; `start` is the first position (generation)."""
    positions_S = torch.arange(start, start + seq_len, device=device)
    token_ids_T = None
    if sample_numbers_B is not None:
        token_ids_T = (sample_numbers_B[:, None] * seq_len + positions_S).flatten()
    positions_T = positions_S.repeat(num_sequences)
    if documents is not None:
        positions_T = positions_T - documents.starts_BS.flatten()
    return ForwardContext(
        seq_len=seq_len,
        positions_t=positions_T,
        token_ids_t=token_ids_T,
        sample_numbers_B=sample_numbers_B,
        documents=documents,
        dropout_seed=dropout_seed,
        recompute=recompute,
        operators=operators,
    )
