"""Collectives over symmetric memory without a GEMM, and the waits and sums that others use too.

Each function has its file (`all_gather.py`, `reduce_scatter.py`, `all_reduce.py`), each kernel its
folder. `sizes.py` chooses the transport, `kernel.py` says how pieces are announced.
"""
