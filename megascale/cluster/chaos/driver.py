"""`python -m megascale.cluster.chaos.driver`: `megascale run` whose agents are rigged.

Standard input is JSON: what `JobSpec.arguments` gives. The backend is the local one with another
agent command, registered under a name of its own in this process only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.cluster.backends import BACKENDS
from megascale.cluster.backends.base import AgentStart, Backend, Sizes
from megascale.cluster.backends.local import LocalBackend
from megascale.cluster.backends.namespaces import gateway
from megascale.cluster.driver.start import run_job
from megascale.errors import MegascaleError

NAME = "rigged"


def rigged(start: AgentStart, _sizes: Sizes, options: Mapping[str, Any]) -> Backend:
    command = (sys.executable, "-m", "megascale.cluster.chaos.agent")
    return LocalBackend(replace(start, command=command), options)


def main() -> int:
    wanted = json.load(sys.stdin)
    BACKENDS[NAME] = rigged
    subnet = wanted["subnet"]
    options = {"namespaces": True, "subnet": subnet, "hosts": 64} if subnet else {}
    try:
        return run_job(
            Path(wanted["recipe"]),
            wanted["overrides"],
            nodes=wanted["nodes"],
            procs_per_node=wanted["procs_per_node"],
            spares=wanted["spares"],
            backend=NAME,
            backend_options=options,
            host=gateway(subnet) if subnet else "127.0.0.1",
        )
    except MegascaleError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
