"""What checkpoints cost: rows of bench `checkpoint` (docs/checkpoint.md)."""
