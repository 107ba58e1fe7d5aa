"""What diagnosis costs and finds: rows of `telemetry` (docs/diagnosis.md)."""
