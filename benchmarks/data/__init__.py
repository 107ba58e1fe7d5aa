"""Benchmarks of data: how fast text becomes token files, how long a step waits for them."""
