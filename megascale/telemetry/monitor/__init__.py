"""The millisecond monitor: what ports moved, every 1 to 10 ms for some seconds, on demand
(MegaScale 5.1: counters by the second hide bursts and the congestion in them).

A child process reads byte counters and marks of congestion of NVLink (NVML), network interfaces
and RDMA ports (sysfs, or a tree that is written like it), keeps them in memory while it samples,
and writes them behind that into the node's file, `RUN/telemetry/node_HOST.jsonl`, as `Counters`
events. `readers/network.py` says what they mean.
"""
