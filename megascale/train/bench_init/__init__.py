"""`megascale bench init`: how long process groups take to create (MegaScale 3.5).

The paper's ladder is every group created by every rank, each ended by a barrier of the whole world
on torch's TCPStore; the same on Redis; and ordered creation, where a rank creates its own groups.
Here each rung is measured twice: with real gloo processes as far as a machine carries them
(`gloo.py`), and with simulated ranks, thousands of connections that make the store calls that torch
makes, in torch's order, each waiting for its answer before the next (`sequences.py`, `clients.py`).
The server is real: torch's own, or redis-server.

What the simulation leaves out is what ranks do beside the store: Python between two calls, and the
connections of NCCL or gloo among themselves. A rung that takes longer than its budget is stopped
after a number of whole groups; the rest is scaled, and the row says so.
"""
