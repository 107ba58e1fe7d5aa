"""The driver against a cluster's worth of agents, over real loopback connections.

    python -m benchmarks.control_plane [--agents 1536] [--ranks 8] [--seconds 60]

Two processes on a core each: the driver as `megascale run` starts it, and the agents, coroutines
that say over HTTP what agents say. See `__main__.py` for what is measured.
"""
