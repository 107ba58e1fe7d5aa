"""The node's self-check, as a process: what hangs in a driver does not hang the agent.

    python -m megascale.cluster.agent.self_check LEVEL DEADLINE_S RUN_DIR [PEER ...]

Prints one line of JSON: `{"detail": {...}}` as `selfcheck.run_node_checks` returned it, or
`{"missing": why}`. Where torch is imported already, because the process is a child of the agent's
template (`train/template.py`), so are its workers (`selfcheck/forked.py`).
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path

MODULE = "megascale.cluster.selfcheck"


def main(level: str, deadline_s: float, run_dir: Path, peers: list[str]) -> None:
    try:
        checks = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": f"not available: {error}"}))
        return
    if "torch" in sys.modules:  # a child of a template: its workers need no start of their own
        importlib.import_module(f"{MODULE}.forked").allow()
    more = {"peers": peers} if peers else {}
    detail = checks.run_node_checks(level, deadline_s, run_dir, **more)
    gc.freeze()  # the interpreter's end does not look through all that was imported
    print(json.dumps({"detail": detail}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
