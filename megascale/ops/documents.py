"""Documents that share a sequence: who sees whom, and what the kernel for packed sequences is told.

Shapes: B sequences of S positions, T = B S tokens, N documents in all, at least one a sequence.

A document's part of a sequence is attended to as a sequence of its own. Everything about it that a
kernel needs as a number of the host (how many, how long the longest) is counted on the host, before
the starts go to the device: nothing waits for it. N and the longest differ between micro-batches;
no kernel here is compiled for them, and no launch is recorded, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch, on the device of its tokens.

    starts_BS   int32 position in its sequence where the document of each token starts
    bounds_N    int32 [N + 1] first token (of T) of each document, and T
    longest     tokens of the longest document's part
    """

    starts_BS: Tensor
    bounds_N: Tensor
    longest: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def are_sequences(self) -> bool:
        """Whether no sequence holds two: then there is nothing to mask."""
        return len(self.bounds_N) - 1 == len(self.starts_BS)

    def visible(self, window: int | None) -> Tensor:
        """Boolean `[B, 1, S, S]`, true where a query sees a key; kept for the other layers."""
        if window not in self._masks:
            positions_S = torch.arange(self.starts_BS.shape[1], device=self.starts_BS.device)
            queries, keys = positions_S[:, None], positions_S
            visible = (keys <= queries) & (keys >= self.starts_BS[:, None, :, None])
            if window is not None:
                visible &= queries - keys < window
            self._masks[window] = visible
        return self._masks[window]


def make_documents(
    starts_BS: Tensor, move: Callable[[Tensor], Tensor] = lambda host: host
) -> Documents:
    """From the starts in host memory; `move` brings a tensor to the device.

    A position whose start is itself begins a document; position 0 always does.
    """
    assert starts_BS.device.type == "cpu", "documents are counted on the host"
    num_sequences, seq_len = starts_BS.shape
    begins_T = (starts_BS == torch.arange(seq_len)).flatten()
    total = torch.tensor([num_sequences * seq_len])
    bounds_N = torch.cat([begins_T.nonzero().flatten(), total]).to(torch.int32)
    assert begins_T[::seq_len].all(), "a sequence begins with a document"
    longest = int(bounds_N.diff().max())
    return Documents(move(starts_BS.to(torch.int32)), move(bounds_N), longest)
