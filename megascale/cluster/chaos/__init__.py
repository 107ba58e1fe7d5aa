"""Faults on purpose, and the table of what they cost: `megascale chaos SCHEDULE.toml RECIPE`.

A real job (driver, agents, trainers, all processes of this machine) meets a seeded schedule of
faults. What the driver's journal says of each is compared with what was done: cause, rank or node,
times, the one event that closes it. After the job its records are compared with those of a run
without faults, and the machine with what it was before.

    schedule.py   the file: which faults, on whom, when
    faults.py     the table of faults: who injects, what must be said and done about it
    inject.py     signals, cgroups, links, files, requests
    live.py       the job under test: its driver, ranks, nodes
    rig.py        what the agents of such a job see in place of GPUs, sysfs and kernel log
    observe.py    the journal, as a story of what was decided when
    judge.py      a fault's line in the table, from that story
    verify.py     loss curve, samples, orphans, ports, ledger
    run.py        a schedule from beginning to end
    report.py     the table, and its rows as JSON

Everything is undone at the end: frozen processes are thawed, cgroups and namespaces removed, and
what the job started is ended. Nothing but processes, links and files of the job is touched.
"""
