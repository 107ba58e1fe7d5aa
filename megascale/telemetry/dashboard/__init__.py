"""The dashboard: one page over a run's store, live (MegaScale 5).

    server.py    uvicorn around `app.py`: routes, each a line over a feed
    guard.py     in front of it: who may ask, and what every answer carries
    live.py      one thread holds the `Run`, refreshes it, and answers what needs it, one at a time
    events.py    server-sent events: what changed, to however many browsers look
    source.py    RUN_DIR or DRIVER_URL: where the run lies, and who drives it
    feeds/       what is answered: a file a subject
    page/        the page itself: plain modules, no build step, nothing from outside

Reading costs a run nothing: the page asks this process, and this process reads files. Everything is
read-only; with a token a person may ask a live run for spans or a profile, or evict a node.
"""
