"""Collectives over symmetric memory without a GEMM, and the waits and sums that other forms share."""
