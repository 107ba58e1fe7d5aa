"""In place of an agent: says that it runs, starts a child that outlives it, and sleeps."""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("--driver", "--token-file", "--run-dir", "--node", "--host-name"):
    parser.add_argument(name, required=True)
parser.add_argument("--switch")
arguments = parser.parse_args()

mark = {**os.environ, "STUB_OF": arguments.run_dir}  # for `Harness.end`
child = subprocess.Popen(["sleep", "600"], start_new_session=True, env=mark)
folder = Path(arguments.run_dir) / "stub"
folder.mkdir(parents=True, exist_ok=True)
said = {
    "pid": os.getpid(),
    "child": child.pid,
    "host": arguments.host_name,
    "switch": arguments.switch,
    "driver": arguments.driver,
    "token": Path(arguments.token_file).read_text(encoding="utf-8"),
}
(folder / f"{arguments.node}.new").write_text(json.dumps(said), encoding="utf-8")
(folder / f"{arguments.node}.new").rename(folder / f"{arguments.node}.json")
time.sleep(600)
