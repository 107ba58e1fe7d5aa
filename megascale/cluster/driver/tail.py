"""A file that another process writes on, read line by line while it grows."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """most_bytes: of a look; what is before is passed over. A file that became shorter is another
    one, and is read from its beginning."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self._most_bytes = path, most_bytes
        self._offset = 0

    def skip(self) -> None:
        """What is there now is not wanted. Raises OSError where that is not to be learnt."""
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def lines(self) -> list[bytes]:
        """Whole lines that were not read yet, of a flood the newest; [] where it cannot be read."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if not 0 <= size - self._offset <= self._most_bytes:
                    self._offset = max(0, size - self._most_bytes)
                file.seek(self._offset)
                data = file.read(self._most_bytes)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()
