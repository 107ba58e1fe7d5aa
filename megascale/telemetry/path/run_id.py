"""What a run is called among others that share a queue: the name of its folder, and an id in it.

Folders of one name are usual (`run`, `baseline`), on one machine or on several, and a folder may be
replaced by another run. So the first who needs the id draws one and leaves it in the run's folder
of records, which the streamers of all nodes and the store see; who finds one takes it.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from megascale.telemetry.path.line_files import telemetry_folder
from megascale.telemetry.path.queue import QueueError

ID_FILE = "run_id"
_CHARACTERS = 12  # 48 bits
_ID = re.compile(rf"[0-9a-f]{{{_CHARACTERS}}}")


def run_name(run_dir: Path) -> str:
    """`FOLDER.ID`: letters, digits and `_.-`. QueueError: the folder's id cannot be read, nor one
    left there."""
    folder = re.sub(r"[^A-Za-z0-9._-]", "_", run_dir.resolve().name)
    return f"{folder}.{_id_of(telemetry_folder(run_dir) / ID_FILE)}"


def _id_of(path: Path) -> str:
    try:
        if not path.exists():
            _leave(path, uuid.uuid4().hex[:_CHARACTERS])
        found = path.read_text().strip()
    except OSError as error:
        raise QueueError(
            f"{path} cannot be {'read' if path.exists() else 'written'} ({error.strerror}); by it "
            "the store and the streamers of a run find each other in its queue"
        ) from None
    if not _ID.fullmatch(found):
        raise QueueError(
            f"{path} holds {found[:40]!r}, and no id of {_CHARACTERS} hexadecimal digits; delete "
            "it, and end the streamers and the store of this run"
        )
    return found


def _leave(path: Path, drawn: str) -> None:
    """Whole, or not at all: of several who leave one in the same moment one does."""
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}.{drawn}")
    aside.write_text(f"{drawn}\n")
    try:
        os.link(aside, path)  # unlike a rename, this never takes the place of another
    except FileExistsError:
        pass
    finally:
        aside.unlink()
