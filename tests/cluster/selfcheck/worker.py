"""A worker that does what its arguments say: for tests of `process.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def main(argv: list[str]) -> None:
    for name, text in zip(argv[::2], argv[1::2], strict=True):
        arguments = json.loads(text)
        print("a library says hello", flush=True)
        print(json.dumps({"workload": name, "at": arguments.get("at", "work")}), flush=True)
        if arguments.get("child"):  # outlives its parent unless somebody ends the group
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(arguments["child"], "w") as file:
                file.write(str(child.pid))
        time.sleep(arguments.get("sleep_s", 0.0))
        if "exit" in arguments:
            print("no such device", file=sys.stderr, flush=True)
            os._exit(arguments["exit"])
        if "error" in arguments:
            print(json.dumps({"workload": name, "error": arguments["error"]}), flush=True)
            continue
        noise = "x" * arguments.get("noise_bytes", 0)
        print(noise)
        print(json.dumps({"workload": name, "result": {"pid": os.getpid()}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
