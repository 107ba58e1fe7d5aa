"""The store: what all ranks recorded, as columns that any process can query while the run lives
(MegaScale 5.1).

A folder of segments under the run. A segment is a folder of Parquet files, a file a table
(`tables.py`), written aside and renamed into place, so readers see all of it or nothing; with it
lies how far each line file had been read (`segments.py`). That is the store's whole state: it can
be killed at any instant and goes on where its last segment ends. Nobody holds a lock to read.

    RUN/telemetry/store/000000000007/           one commit
    RUN/telemetry/store/000000000001-000000000006/   six of them, merged
        positions.json  sums.parquet  steps.parquet  spans.parquet ...

A database file would lock readers out of a live run; a server would be one more thing to run.
"""
