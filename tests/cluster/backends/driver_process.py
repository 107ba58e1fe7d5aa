"""A driver that allocates and is then killed: argv is a JSON of backend, start, options, count."""

import json
import sys
import time
from dataclasses import asdict

from megascale.cluster.backends import make_backend
from megascale.cluster.backends.base import AgentStart

given = json.loads(sys.argv[1])
backend = make_backend(given["name"], AgentStart(**given["start"]), options=given["options"])
machines = backend.allocate(given["count"])
print(json.dumps([asdict(machine) for machine in machines]), flush=True)
time.sleep(600)
