"""The same training step by other systems, beside megascale on the same GPUs in the same minutes.

`megatron.py` and `titan.py` are programs for torchrun, one run each: they build the peer's own
model in the shape of a megascale preset, train a few steps on random tokens and print one line of
JSON. `compare.py` runs megascale and the peers in turn (A B C A B C) and writes the rows. What each
peer got, and what it could not get, is the table of `README.md` beside this file.

A peer is used as its own examples use it, and none of its code is replaced. Where it leaves an
operator to a library that is absent (attention, norms, Adam), it is handed torch's fastest.
"""
