"""Readers: a question about a run, asked of its store (MegaScale 5, 6.3).

Each file takes what it needs from a `Run`, hands it to a pure function of `diagnose/`, and gives an
`Answer`: JSON for the dashboard and `megascale diagnose RUN NAME --json`, sentences for a person.
"""
