"""Where a rank leaves what others read, under the run folder; as `train` writes it."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 4096


def log_file(run_dir: Path, rank: int) -> Path:
    """Output of global rank `rank`, of all its epochs."""
    return run_dir / "logs" / f"rank{rank:05d}.log"


def error_file(run_dir: Path, rank: int) -> Path:
    """JSON with time_ns, message and exit_code, by a rank that failed."""
    return run_dir / "logs" / f"error-rank{rank:05d}.json"


def line_file(run_dir: Path, rank: int) -> Path:
    """Events of global rank `rank` (`events.py`)."""
    return run_dir / "telemetry" / f"rank_{rank:05d}.jsonl"


def recorder_files(run_dir: Path, rank: int) -> list[Path]:
    """What torch's flight recorder left of the rank; torch appends the rank to the name."""
    return sorted((run_dir / "logs").glob(f"flight_*rank_{rank}")) + sorted(
        (run_dir / "logs").glob(f"flight_*rank_{rank}.json")
    )


def last_line_end(path: Path) -> int:
    """Bytes up to and with the last newline, 0 without one: where the next rank's lines begin."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        end = os.fstat(descriptor).st_size
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            newline = os.pread(descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0
    finally:
        os.close(descriptor)


def last_line(path: Path, offset: int) -> str:
    """The last line that is not blank and lies behind `offset`; of a long one the end. The agent's
    own lines are none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - _BLOCK_BYTES))
            text = file.read(_BLOCK_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("[agent]")), "")
