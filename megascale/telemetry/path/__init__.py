"""From the line files of a node to the store: streamer -> queue -> store (MegaScale 5.1).

A streamer a node follows its ranks' files and publishes what is new; the store takes it from the
queue and commits segments. Delivery is at least once, and every message says which bytes of which
file it holds, so the store passes over what it has: killed at any place and started again, nothing
is lost and nothing counts twice.
"""
