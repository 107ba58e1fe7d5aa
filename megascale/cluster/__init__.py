"""The control plane: driver, agents, heartbeats, decisions and backends (MegaScale 4).

The room is empty so far. What comes here starts `megascale train` as a process and never imports
it: the two meet through the command line, `env.py` and `events.py` only. No torch.
"""
