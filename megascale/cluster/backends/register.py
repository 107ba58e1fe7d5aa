"""What a job has of a backend, in the run folder: machines, blocked hosts, and who owns them.

    RUN_DIR/backend/NAME.json   the register: written to a temporary file and renamed
    RUN_DIR/backend/NAME.lock   held (flock) for each change

**Fencing.** `claim` writes a new owner. Every other use checks that the owner is still the one that
this process wrote, so a driver that was thought dead and comes back changes nothing: it gets
FencedError. The lock makes check and change one, between threads and between drivers.

**Intent first.** A machine is written before its agent starts and completed after, so an agent
whose driver died between the two is still found and ended by the next (`adopt`).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale.cluster.backends.base import BackendError, FencedError, Machine

LOCK_S = 30.0


class Record(BaseModel):
    """A machine as the register keeps it."""

    model_config = ConfigDict(extra="forbid")

    name: str
    host: str
    switch: str | None = None
    handle: str = ""

    def machine(self) -> Machine:
        return Machine(self.name, self.host, self.switch, self.handle)


class State(BaseModel):
    """The register's content.

    job      random, of this run folder: the mark on all that the backend starts
    past     host by name, of machines that were given up
    given    how often a host was given, by host; also other counts that must not go back
    blocked  reason by host
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    job: str = Field(default_factory=lambda: secrets.token_hex(4))
    owner: str = ""
    machines: dict[str, Record] = Field(default_factory=dict)
    past: dict[str, str] = Field(default_factory=dict)
    given: dict[str, int] = Field(default_factory=dict)
    blocked: dict[str, str] = Field(default_factory=dict)

    def new_name(self, host: str) -> str:
        """`host` at first, then `host.2`, `host.3`: counted here, so each is given once."""
        number = self.count(host)
        return host if number == 1 else f"{host}.{number}"

    def count(self, what: str) -> int:
        self.given[what] = self.given.get(what, 0) + 1
        return self.given[what]

    def drop(self, name: str, *, block: str | None = None) -> Record | None:
        """Take a machine out; None if it was out already. `block`: the reason, if it is blocked."""
        record = self.machines.pop(name, None)
        host = record.host if record else self.past.get(name)
        if host is None:
            known = ", ".join([*self.machines, *self.past]) or "none"
            raise BackendError(f"no machine {name!r} was given to this job; given so far: {known}")
        self.past[name] = host
        if block is not None:
            self.blocked[host] = block
        return record

    def switches(self) -> dict[str, str | None]:
        return {record.name: record.switch for record in self.machines.values()}


class Register:
    """The register of backend `backend` in `run_dir`; `folder` is made if it is not there."""

    def __init__(self, run_dir: str, backend: str) -> None:
        self.folder = Path(run_dir).absolute() / "backend"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"{backend}.json"
        self._lock_path = self.folder / f"{backend}.lock"
        self._thread_lock = threading.Lock()
        self._owner = ""

    @property
    def claimed(self) -> bool:
        """This process has been the owner; it may be stale by now."""
        return bool(self._owner)

    @contextmanager
    def held(self, *, claim: bool = False) -> Iterator[State]:
        """The state, for one change; written when the block ends, also by an exception.

        `claim` makes this the owner if it never was. FencedError if another is the owner by now;
        BackendError if the lock is not free within LOCK_S.
        """
        with self._locked():
            state = self._read()
            if claim and not self._owner:
                self._owner = state.owner = secrets.token_hex(8)
                self.write(state)
            elif not self._owner or state.owner != self._owner:
                raise FencedError(self._fenced())
            before = state.model_copy(deep=True)
            try:
                yield state
            finally:
                if state != before:
                    self.write(state)

    def write(self, state: State) -> None:
        """To be called inside `held` where what follows must find the state written."""
        temporary = self.path.with_suffix(".new")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(state.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def _read(self) -> State:
        if not self.path.exists():
            return State()
        try:
            return State.model_validate_json(self.path.read_text(encoding="utf-8"))
        except ValidationError as error:
            raise BackendError(
                f"{self.path} is no register of version 1: {error.errors()[0]['msg']}; end what "
                "the job still runs by hand, then remove the file"
            ) from None

    def _fenced(self) -> str:
        if not self._owner:
            return f"this driver does not own {self.path} yet; allocate or adopt before all else"
        return (
            f"another driver took the machines in {self.path}; this one is stale and must end, the "
            "other has the job"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Not to be nested. Threads of this process first, then other processes."""
        if not self._thread_lock.acquire(timeout=LOCK_S):
            raise BackendError(f"{self.path} was not free within {LOCK_S:g} s in this driver")
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for(descriptor)
            yield
        finally:
            os.close(descriptor)
            self._thread_lock.release()

    def _wait_for(self, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BackendError(
                        f"{self._lock_path} is held by another driver since {LOCK_S:g} s; end it"
                    ) from None
                time.sleep(0.02)
