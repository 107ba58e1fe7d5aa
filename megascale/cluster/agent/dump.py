"""Where each thread of a rank stands: py-spy's stacks, and what flight recorders left.

py-spy reads the memory of a process without stopping it (`--nonblocking`), so a rank that hangs,
also in a C call that holds the GIL, can be asked; one that runs may be read while it moves, and is
asked again once. What it says is cut so that a node's dump fits into one result.

    {"stacks": {"0": [{"thread": "MainThread", "active": true, "gil": false,
                       "frames": ["wait (threading.py:331)", ...]}]},        innermost first
     "recorders": {"0": [{"path": ..., "bytes": ..., "text": ...}]},        text of JSON files alone
     "missing": {"1": "why there are no stacks"}}
"""

from __future__ import annotations

import json
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
MOST_THREADS, MOST_FRAMES, MOST_FRAME = 64, 64, 200
_RECORDER_BYTES = 256 << 10


def dump(ranks: Mapping[int, tuple[int, Path]]) -> dict[str, Any]:
    """Stacks and recorders of global ranks, each with its pid and run folder."""
    found: dict[str, Any] = {"stacks": {}, "recorders": {}, "missing": {}}
    share = RESULT_BYTES // max(1, len(ranks))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {rank: pool.submit(stacks, pid) for rank, (pid, _) in ranks.items()}
    for rank, (_, run_dir) in ranks.items():
        try:
            threads = asked[rank].result()
        except OSError as error:
            found["missing"][str(rank)] = str(error)[:MOST_FRAME]
        else:
            found["stacks"][str(rank)] = _cut(threads, share // 2)
        recorders = _recorders(run_dir, rank, share // 2)
        if recorders:
            found["recorders"][str(rank)] = recorders
    return found


def stacks(pid: int) -> list[dict[str, Any]]:
    """The process's threads, the innermost frame first. Raises OSError where py-spy has none."""
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    command = [program, "dump", "--pid", str(pid), "--nonblocking", "--json"]
    said = ""
    for _ in range(ATTEMPTS):
        try:
            output, said = _run(command)
        except FileNotFoundError:
            raise OSError("py-spy is not installed: pip install 'megascale[cluster]'") from None
        if output:
            return [_thread(thread) for thread in json.loads(output)[:MOST_THREADS]]
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


def _thread(thread: Mapping[str, Any]) -> dict[str, Any]:
    frames = [
        f"{frame['name']} ({frame.get('short_filename') or frame['filename']}:{frame['line']})"
        for frame in thread["frames"][:MOST_FRAMES]
    ]
    return {
        "thread": thread.get("thread_name") or str(thread["thread_id"]),
        "active": bool(thread["active"]),
        "gil": bool(thread["owns_gil"]),
        "frames": [frame[:MOST_FRAME] for frame in frames],
    }


def _cut(threads: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """As many threads as fit, the main thread and active ones first."""
    threads = sorted(threads, key=lambda t: (t["thread"] != "MainThread", not t["active"]))
    kept: list[dict[str, Any]] = []
    for thread in threads:
        most_bytes -= len(json.dumps(thread))
        if most_bytes < 0:
            break
        kept.append(thread)
    return kept


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
