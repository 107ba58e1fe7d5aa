"""The driver: the process around `decide.py` (MegaScale 4.1).

    start.py      from a command line to a job and back to an exit code
    runtime.py    the loop: what came in -> digest -> detectors -> decide -> journal -> actions
    desk.py       what agents said and what they are to be told, shared with the HTTP thread
    server.py     FastAPI, `gate.py` in front of it: token, size, and the short way of heartbeats
    digest.py     heartbeats to events; `progress.py`: deadlines; `detectors.py`: who is asked
    actions.py    orders to agents and backend
    journal.py    every transition in SQLite; `lock.py`: one driver a run folder

One thread decides. The HTTP thread only fills and reads the desk; backends are called in a thread
of their own. FastAPI is imported in server.py and nowhere else.
"""
