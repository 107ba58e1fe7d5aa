"""Programs that measure; each appends rows to `results/`."""
