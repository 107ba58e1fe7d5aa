"""How the agent starts what must end with it (`birth.py`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PROGRAM = Path(__file__).with_name("birth.py")


def birth() -> list[str]:
    """What stands before the command of a process that dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid())]
