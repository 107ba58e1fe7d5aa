"""What NVML answers to everything that agents and self-checks ask it, into a file for the tests.

    python -m tools.record_nvml OUT.json [--busy-s 3]

Run on a machine with GPUs; put the file into `tests/cluster/recorded_nvml/`, where a test replays
each (`tests/cluster/test_recorded_nvml.py`). Asked is by the program's own readers: the agent's
(`agent/device_child.py`) and the self-check's (`selfcheck/nvml.py`), at rest and while each GPU
multiplies matrices. Serial numbers are not kept: a GPU's UUID is replaced by its number.

    {"device": "NVIDIA H200", "driver": "580.1", "pynvml": "13.615.71",
     "moments": {"idle": [{"function": "nvmlDeviceGetName", "arguments": ["gpu 0"],
                           "answer": "NVIDIA H200"}, ...], "busy": [...]}}

A call that failed has "error" in place of "answer"; a structure is its fields.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.cluster.agent.device_child import Nvml
from megascale.cluster.selfcheck.nvml import read_nvml
from megascale.env import installed_versions

SETTLE_S = 1.5  # until clocks and power are those of the work
_WORK = """
import sys, time, torch
matrices = [torch.randn(8192, 8192, device=f"cuda:{i}", dtype=torch.bfloat16)
            for i in range(torch.cuda.device_count())]
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for matrix in matrices:
        matrix @ matrix
    for index in range(len(matrices)):
        torch.cuda.synchronize(index)
"""


class Recorder:
    """`pynvml`, and what was asked and answered. Handles are called "gpu 0", "gpu 1", ..."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: list[tuple[Any, str]] = []
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._nvml, name)
        if not name.startswith("nvml"):  # a constant, the class of errors
            return found

        def call(*arguments: Any) -> Any:
            entry: dict[str, Any] = {
                "function": name,
                "arguments": [self._name(argument) for argument in arguments],
            }
            self.calls.append(entry)
            try:
                answer = found(*arguments)
            except self._nvml.NVMLError as error:
                entry["error"] = str(error)
                raise
            if name == "nvmlDeviceGetHandleByIndex":
                self._handles.append((answer, f"gpu {arguments[0]}"))
            entry["answer"] = self._kept(name, entry["arguments"], answer)
            return answer

        return call

    def _name(self, value: Any) -> Any:
        if isinstance(value, int | float | str):
            return value
        return next((name for known, name in self._handles if known is value), "object")

    def _kept(self, function: str, arguments: list[Any], answer: Any) -> Any:
        if function == "nvmlDeviceGetUUID":
            return f"GPU-{arguments[0].removeprefix('gpu '):0>8}"
        if isinstance(answer, bytes):
            return answer.decode()
        if isinstance(answer, list | tuple):
            return [int(part) for part in answer]
        if hasattr(answer, "used"):
            return {"used": int(answer.used), "total": int(answer.total)}
        return answer if isinstance(answer, int | float | str | None) else self._name(answer)


def record(nvml: Any) -> list[dict[str, Any]]:
    """The calls of one moment."""
    recorder = Recorder(nvml)
    Nvml(recorder).read()
    read_nvml(recorder, lambda _what: None)
    return recorder.calls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.record_nvml")
    parser.add_argument("output", type=Path)
    parser.add_argument("--busy-s", type=float, default=3.0, help="0: at rest alone")
    given = parser.parse_args()
    try:
        import pynvml
    except ImportError:
        print("error: nvidia-ml-py is not installed: pip install 'megascale[cluster]'")
        return 2
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        print(f"error: NVML does not start ({error}); this must run where GPUs are")
        return 2
    moments = {"idle": record(pynvml)}
    if given.busy_s:
        moments["busy"] = _while_busy(given.busy_s, lambda: record(pynvml))
    content = {
        "device": str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))),
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "pynvml": installed_versions(("nvidia-ml-py",)).get("nvidia-ml-py"),
        "moments": moments,
    }
    given.output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{given.output}: {', '.join(f'{len(calls)} calls {m}' for m, calls in moments.items())}")
    return 0


def _while_busy(seconds: float, look: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", _WORK, str(SETTLE_S + seconds)]
    work = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert work.stdout is not None
    try:
        if not work.stdout.readline():
            raise SystemExit("error: the matrices could not be multiplied: --busy-s 0")
        time.sleep(SETTLE_S)
        return look()
    finally:
        work.wait()


if __name__ == "__main__":
    sys.exit(main())
