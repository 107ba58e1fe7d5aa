"""What a node must pass before it joins, and after a fault (MegaScale 4.3).

    run.py       the checks of a level, in order, within a deadline: `run_node_checks`
    plan.py      which checks, how long; process.py  workers that can always be ended
    host.py kernel_log.py nvml.py memory.py    read by `probe.py`, without torch
    gpus.py judge.py rdma.py                   verdicts
    expected.py expected.toml learned.py       with what figures are compared
    pairs.py     which nodes meet, and which of them a failed meeting accuses

What needs torch is a process of `megascale.train.selfcheck`. No torch here.
"""

from megascale.cluster.selfcheck.run import run_node_checks

__all__ = ["run_node_checks"]
