"""`megascale bench flux`: the fused operators against cuBLAS, NCCL and torch, on these GPUs.

One run starts a rank a GPU (`start.py`), and each rank (`rank.py`) goes through the cases
(`cases.py`), the important ones first. For a case the tuner chooses a form; then everything is
timed in one interleaved run (`measure.py`): cuBLAS alone on the full shape, NCCL and cuBLAS,
torch's operators, each form of ours in its best configuration. Values are checked against fp32
before and after the timing. A row a case is appended as soon as it is measured (`rows.py`), so a
run that is stopped keeps what it has. What a row must reach is in `targets.py`, what means over
rows must reach in `summary.py`.

Baselines are methods of the same run: same inputs, same clocks, same temperature.
"""
