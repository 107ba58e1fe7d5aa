"""The agent of a node: starts its ranks, says each second how they are, obeys (MegaScale 4.1).

    python -m megascale.cluster.agent --driver URL --token-file F --node NAME --run-dir D

Threads that never wait for one another:

    main        starts and ends processes (`processes.py`): a child that was started from another
                thread would die with that thread
    heartbeat   tells the driver, at a fixed rate, what is known (`heartbeat.py`, `board.py`)
    commands    a long poll; hands commands to main; another thread posts results (`commands.py`)
    collector   reads logs, line files and interfaces, which may be slow (`collector.py`)
    devices     asks a child that asks NVML, and kills it when it hangs (`devices.py`)

Nothing outlives the agent: a rank dies with it (`birth.py`), a watchdog ends what the rank had
started (`watchdog.py`), and the next agent of the node looks again (`ledger.py`).
"""
