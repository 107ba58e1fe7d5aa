"""megascale: train large language models with 3D parallelism, and see what every rank does.

Layers (imports go downwards only, held by import-linter; see `docs/architecture.md`):
0 `config errors topology shards units env events trace` · 1 `plan telemetry` · 2 `ops` ·
3 `flux model optim data checkpoint` · 4 `parallel` · 5 `train serve cluster` · 6 `cli`.
"""

__version__ = "0.1.0"
