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
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megascale.cluster.agent.run_files import recorder_files
from megascale.cluster.messages import BODY_BYTES

DEADLINE_S = 2.0  # for all ranks of the node: a hang waits for it; a call of py-spy takes 0.03 s
ATTEMPTS = 2
AT_ONCE = 8
RESULT_BYTES = BODY_BYTES // 2
_REASON = 200
_RECORDER_BYTES = 256 << 10


def dump(ranks: Mapping[int, tuple[int, Path]]) -> dict[str, Any]:
    """Stacks and recorders of global ranks, each with its pid and run folder.

    Takes `DEADLINE_S` at most; who was not read by then is missing.
    """
    give_up_s = time.monotonic() + DEADLINE_S
    found: dict[str, Any] = {"stacks": {}, "recorders": {}, "missing": {}}
    share = RESULT_BYTES // max(1, len(ranks))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {rank: pool.submit(stacks, pid, give_up_s) for rank, (pid, _) in ranks.items()}
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


def stacks(pid: int, give_up_s: float) -> str:
    """Text of `py-spy dump`: the process's threads, the innermost frame first.

    give_up_s  of the monotonic clock
    Raises OSError where there is none.
    """
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    said = ""
    for _ in range(ATTEMPTS):
        try:
            output, said = _run([program, "dump", "--pid", str(pid), "--nonblocking"], give_up_s)
        except FileNotFoundError:
            raise OSError("py-spy is not installed: pip install 'megascale[cluster]'") from None
        if output:
            return output.decode(errors="replace")
    raise OSError(f"py-spy: {said or 'no stacks'}")


def _run(command: list[str], give_up_s: float) -> tuple[bytes, str]:
    """Its output where it ended well, and the last line of its errors. Waits no longer than told,
    also for one that does not die."""
    left_s = give_up_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError(f"no time was left: a node's dump has {DEADLINE_S:.1f} s")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.2)
        raise TimeoutError(f"py-spy did not end in {DEADLINE_S:.1f} s") from None
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
