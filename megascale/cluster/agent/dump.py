"""Where each thread of a rank stands: py-spy's stacks, and what flight recorders left.

py-spy reads the memory of a process without stopping it (`--nonblocking`), so a rank that hangs,
also in a C call that holds the GIL, can be asked; one that runs may be read while it moves, and is
asked again once. What it says is cut so that a node's dump fits into one result.

    {"stacks": {"0": "Thread 0x7F.. (idle): \"MainThread\"\n    wait (threading.py:331)\n..."},
     "recorders": {"0": [{"path": ..., "bytes": ..., "text": ...}]},        text of JSON files alone
     "missing": {"1": "why there are no stacks"}}
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megascale.cluster.agent.run_files import recorder_files
from megascale.cluster.messages import BODY_BYTES

DEADLINE_S = 10.0  # of one call of py-spy
ATTEMPTS = 2
AT_ONCE = 4
RESULT_BYTES = BODY_BYTES // 2
_REASON = 200
_RECORDER_BYTES = 256 << 10


def dump(ranks: Mapping[int, tuple[int, Path]]) -> dict[str, Any]:
    """Stacks and recorders of global ranks, each with its pid and run folder."""
    found: dict[str, Any] = {"stacks": {}, "recorders": {}, "missing": {}}
    share = RESULT_BYTES // max(1, len(ranks))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {rank: pool.submit(stacks, pid) for rank, (pid, _) in ranks.items()}
    for rank, (_, run_dir) in ranks.items():
        try:
            text = asked[rank].result()
        except OSError as error:
            found["missing"][str(rank)] = str(error)[:_REASON]
        else:
            found["stacks"][str(rank)] = _cut(text, share)
        recorders = _recorders(run_dir, rank, share // 2)
        if recorders:
            found["recorders"][str(rank)] = recorders
    return found


def stacks(pid: int) -> str:
    """Text of `py-spy dump`: the process's threads, the innermost frame first.

    Raises OSError where there is none.
    """
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    said = ""
    for _ in range(ATTEMPTS):
        try:
            output, said = _run([program, "dump", "--pid", str(pid), "--nonblocking"])
        except FileNotFoundError:
            raise OSError("py-spy is not installed: pip install 'megascale[cluster]'") from None
        if output:
            return output.decode(errors="replace")
    raise OSError(f"py-spy: {said or 'no stacks'}")


def _run(command: list[str]) -> tuple[bytes, str]:
    """Its output where it ended well, and the last line of its errors. Waits no longer than told,
    also for one that does not die."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        raise TimeoutError(f"py-spy did not end in {DEADLINE_S:.0f} s") from None
    said = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return (output if process.returncode == 0 else b""), said


def _cut(text: str, most: int) -> str:
    """The threads that fit, the main thread and those that run first, in whole lines."""
    if len(text) <= most:
        return text
    head, *threads = re.split(r"(?m)^(?=Thread )", text)
    threads.sort(key=lambda thread: ('"MainThread"' not in thread, "(active" not in thread))
    whole = "".join([head, *threads])[:most]
    return whole[: whole.rfind("\n") + 1] + "(cut)\n"


def _recorders(run_dir: Path, rank: int, most_bytes: int) -> list[dict[str, Any]]:
    """A pickle is named, never read: whoever asks opens it where the run folder is."""
    found = []
    for file in recorder_files(run_dir, rank):
        try:
            size = file.stat().st_size
            entry: dict[str, Any] = {"path": str(file), "bytes": size}
            if file.suffix == ".json" and size <= min(most_bytes, _RECORDER_BYTES):
                entry["text"] = file.read_text(errors="replace")
                most_bytes -= size
        except OSError:
            continue
        found.append(entry)
    return found
