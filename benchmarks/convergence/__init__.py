"""Do the paper's algorithms learn as well? Rows of bench `convergence` (docs/convergence.md)."""
