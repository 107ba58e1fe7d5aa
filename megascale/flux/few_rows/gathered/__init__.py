"""A GEMM of few rows that are gathered from all ranks."""
