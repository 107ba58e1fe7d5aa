"""Places that a measurement writes to: made when the arguments are read, not an hour later."""

from __future__ import annotations

import argparse
from pathlib import Path


def writable_file(text: str) -> Path:
    """A file that rows are appended to; its folder is made. For `type=` of an argument."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from error
    return path


def writable_folder(text: str) -> Path:
    """A folder that files are put into; it is made. For `type=` of an argument."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {error.strerror}") from error
    return path
