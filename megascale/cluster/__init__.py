"""The control plane: a driver, an agent a node, trainers as processes (MegaScale 4).

    driver   outside all nodes; owns epoch, rank map, block list, incidents and ledger. Journals
             every transition, so that its death costs nothing but the seconds until its restart.
    agent    one a node; starts the node's ranks, reports them each second, obeys.
    trainer  `megascale train`, a process that knows nothing of either: it writes its progress page
             (`events.py`), its line file and, when it fails, its error. Never imported from here.

Everything goes from the agent to the driver: heartbeats, results, and a long poll that brings
commands back (`messages.py`). A command carries the epoch and a sequence number; the agent obeys
each once and refuses those of an older epoch. The driver judges silence by its own monotonic clock;
wall times are for people.

    messages.py   what goes over the wire
    decide.py     one pure function: (job, event, now) -> (job, actions, reason)
    driver/       the process around it: HTTP, journal, clock, detectors
    agent/        processes, heartbeats, logs, devices
    backends/     who has the machines: local, slurm, kubernetes
    selfcheck/    what a node must pass before it joins
    chaos/        faults on purpose, and the table of what they cost
No torch.
"""
