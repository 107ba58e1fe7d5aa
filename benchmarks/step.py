"""`megascale bench step` by the name that older rows of `results/step.jsonl` give as command."""

from __future__ import annotations

import sys

from megascale.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "step"]
    main()
