"""The tables of the store: their columns and types, as data.

Times are wall-clock ns (`unix_ns`): a rank's monotonic times are placed by the header of its start,
so that ranks of several hosts share a timeline as far as their hosts' clocks agree.
`start` counts the headers in a rank's file from 0: after a restart a step may come again, and the
rows of the highest start count. `epoch` is the driver's, 0 without one.

`sums` has a row a rank and step, and for every phase that occurs two columns more: `ns:forward`
(int64, total time of the step) and `n:forward` (int32, how often). One row, not one a phase: a
tenth of the rows, and a mean over ranks reads only the columns it is asked for. Segments differ in
these columns; a reader joins them by name, and an absent one is null.
"""

from __future__ import annotations

from collections.abc import Mapping

SUM_NS = "ns:"
SUM_COUNT = "n:"

TABLES: Mapping[str, Mapping[str, str]] = {
    "ranks": {  # a header: a start of a rank
        "rank": "int32",
        "start": "int32",
        "epoch": "int32",
        "host": "string",
        "pid": "int64",
        "world_size": "int32",
        "tensor": "int32",
        "data": "int32",
        "pipeline": "int32",
        "unix_ns": "int64",
        "device": "string",
        "versions": "string",  # JSON
    },
    "steps": {
        "rank": "int32",
        "start": "int32",
        "step": "int64",
        "t0_ns": "int64",
        "dur_ns": "int64",
        "clock": "string",
        "sampled": "bool",
        "launch_ns": "int64",
        "issued_ns": "int64",
    },
    "sums": {"rank": "int32", "start": "int32", "step": "int64"},
    "spans": {
        "rank": "int32",
        "start": "int32",
        "step": "int64",
        "name": "string",
        "t0_ns": "int64",
        "dur_ns": "int64",
        "clock": "string",
        "stream": "string",
        "chunk": "int32",
        "micro_batch": "int32",
        "op": "string",
        "group": "string",
        "seq": "int64",
        "peer": "int32",
        "num_bytes": "int64",
        "payload": "string",
        "bucket": "string",
        "work": "string",
        "issued_ns": "int64",
        "derived": "bool",
    },
    "ongoing": {  # what a rank was in at the deadline of a collective
        "rank": "int32",
        "start": "int32",
        "step": "int64",
        "t_ns": "int64",
        "waited_ns": "int64",
        "name": "string",
        "phase": "string",
        "chunk": "int32",
        "micro_batch": "int32",
        "op": "string",
        "group": "string",
        "seq": "int64",
        "peers": "string",  # JSON, global ranks
        "posted": "string",  # JSON, the last operation by group
        "error": "string",
    },
    "incidents": {
        "rank": "int32",
        "start": "int32",
        "step": "int64",
        "name": "string",
        "t_ns": "int64",
        "detail": "string",  # JSON
    },
    "anchors": {
        "rank": "int32",
        "start": "int32",
        "clock": "string",
        "t_ns": "int64",
        "reading_ns": "int64",
        "error_ns": "int64",
        "drift_ppm": "double",
    },
    "dropped": {"rank": "int32", "start": "int32", "where": "string", "count": "int64"},
    "counters": {  # of the millisecond monitor; `rank` -1: a node's, not a rank's
        "rank": "int32",
        "start": "int32",
        "host": "string",
        "port": "string",  # "nvlink0.3", "eth0", "mlx5_0/1"
        "t_ns": "int64",
        "sent_bytes": "int64",
        "received_bytes": "int64",
        "speed_bytes_per_s": "double",  # what the link can do, where that is known
        "congestion": "int64",  # marks of it so far (ECN, pauses, discards), where counted
    },
    "unreadable": {  # lines that are no events of this version: how many, and the first
        "rank": "int32",
        "start": "int32",
        "file": "string",
        "offset": "int64",
        "count": "int64",
        "why": "string",
    },
}
"""Column types by table, as Arrow names them; every column but `rank` and `start` may be null."""
