"""One loader a node: MegaScale's two-layer tree (MegaScale 3.4). No torch.

process.py   the loader: reads every sample that the node's data ranks need, once
ring.py      where it writes them: global batches in shared memory, counters beside them
source.py    a rank's end: copies its share, knows who is missing
node.py      the first rank's end: makes the memory, starts the loader, ends it
"""
