"""Who trains in a run folder: the file `lock` in it, locked by rank 0 as long as it lives.

The file says HOST process PID, and the epoch where a driver started the rank. The system releases
the lock when the process dies, however it dies; but one that stands still, or whose machine is cut
off, keeps it. Under a driver that is no reason to stop: a rank of a later epoch puts a file of its
own in its place, and who finds a later epoch there has been given up and saves no more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from megascale.env import hostname
from megascale.errors import CheckpointError, ConfigError, LaunchError

logger = logging.getLogger(__name__)
_EPOCH = re.compile(r", epoch (\d+)$")


class RunLock:
    """Of one run folder. epoch: of the rank that asks; 0 without a driver."""

    def __init__(self, folder: Path, epoch: int = 0) -> None:
        self.file = folder / "lock"
        self._epoch = epoch

    def check(self) -> None:
        """Raises ConfigError where somebody trains."""
        if self.file.exists():
            with self.file.open() as file:
                if not self._is_free(file.fileno(), fcntl.LOCK_SH):
                    raise self._in_use()

    def take(self) -> int:
        """The descriptor that holds it until it is closed.

        Raises ConfigError where somebody trains who is not of an earlier epoch, CheckpointError
        where nothing can be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
            if not self._is_free(descriptor, fcntl.LOCK_EX):
                os.close(descriptor)
                descriptor = self._take_over()
        except OSError as error:
            raise CheckpointError(
                f"the run folder {self.file.parent} cannot be written: {error}; free space or mend "
                "its permissions, what it held is untouched"
            ) from error
        return descriptor

    def write_holder(self, descriptor: int) -> None:
        epoch = f", epoch {self._epoch}" if self._epoch else ""
        with suppress(OSError):  # a full disk costs the name of the holder, not the lock
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{hostname()} process {os.getpid()}{epoch}\n".encode(), 0)

    def check_epoch(self) -> None:
        """Raises LaunchError where a rank of a later epoch has the folder."""
        if self._epoch and self._holders_epoch() > self._epoch:
            raise LaunchError(
                f"{self.file.parent} belongs to epoch {self._holders_epoch()} now, this rank is of "
                f"epoch {self._epoch}: it was given up, and nothing of it is saved"
            )

    def _take_over(self) -> int:
        if not 0 < self._holders_epoch() < self._epoch:
            raise self._in_use()
        logger.warning("%s is taken from %s", self.file.parent, self._holder())
        new = self.file.with_name(f"lock.{self._epoch}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._is_free(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            raise self._in_use()
        self.write_holder(descriptor)
        new.replace(self.file)
        return descriptor

    def _is_free(self, descriptor: int, kind: int) -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing keeps a second start away", self.file, error
            )
        return True

    def _holder(self) -> str:
        with suppress(OSError):
            return self.file.read_text().strip()
        return ""

    def _holders_epoch(self) -> int:
        found = _EPOCH.search(self._holder())
        return int(found[1]) if found else 0

    def _in_use(self) -> ConfigError:
        return ConfigError(
            f"{self.file.parent} is in use: {self._holder() or 'another process'} trains there; "
            "stop it first, or start another run with --set job.run_dir=ANOTHER"
        )
