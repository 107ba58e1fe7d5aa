"""A GEMM of few rows whose tiles are summed over ranks."""
