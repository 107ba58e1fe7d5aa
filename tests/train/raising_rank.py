"""`megascale` whose first attention on rank 0 raises what nobody expects; a program for a test."""

from __future__ import annotations

import os

import torch.nn.functional as F

from megascale.cli import main

WORDS = "a kernel that is not there"


def _raise(*_arguments: object, **_options: object) -> None:
    raise TypeError(WORDS)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        F.scaled_dot_product_attention = _raise  # type: ignore[assignment]
    main()
