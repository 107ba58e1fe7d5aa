"""One driver on one run folder: its parts put together, and taken apart at the end."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from megascale.cluster.backends import make_backend
from megascale.cluster.backends.base import AgentStart, Backend, FencedError
from megascale.cluster.driver import takeover
from megascale.cluster.driver.address import check_address
from megascale.cluster.driver.lock import FencedDriverError
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.runtime import Driver
from megascale.cluster.driver.server import Server, make_token
from megascale.cluster.driver.words import Dated
from megascale.cluster.transitions import Policy
from megascale.config import RunConfig, load_config
from megascale.errors import ConfigError, LaunchError

FOLDER = "driver"


@dataclass(frozen=True)
class Job:
    """What is run, on what. `config` is None for somebody else's script.

    settings  what the next driver is compared with (`takeover.py`)
    """

    program: Program
    policy: Policy
    backend: str = "local"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    config: RunConfig | None = None
    recipe: Path | None = None
    overrides: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.program.run_dir / FOLDER


def run(job: Job, backend: Backend | None = None) -> int:
    """Until the job ends; signals ask it to save and stop. `backend` as of `start`.

    A driver whose job another one has by now says so in a line and gives 5.
    """
    to_terminal = logging.StreamHandler(sys.stdout)
    to_terminal.setFormatter(Dated("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[to_terminal])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    started = start(job, backend)
    old = {s: signal.signal(s, started.on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        print(f"run folder  {job.program.run_dir}")
        print(f"API         {started.server.url}/v1/status (OpenAPI: /openapi.json)")
        print(f"token       {started.token_file}", flush=True)
        return started.driver.run()
    except (FencedDriverError, FencedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
        started.server.close()


@dataclass(frozen=True)
class Started:
    """A driver whose API answers and whose loop has not begun: `driver.run()` is next."""

    driver: Driver
    server: Server
    token_file: Path

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.driver.stop(f"got {signal.Signals(signum).name}")


def start(job: Job, backend: Backend | None = None) -> Started:
    """Lock, journal, token, server. `backend` in place of the one that `job` names (tests).

    A driver that comes back listens where the one before did: its agents know no other place.
    Raises LaunchError where the run folder cannot be written.
    """
    try:
        return _start(job, backend)
    except OSError as error:
        raise LaunchError(
            f"the run folder {job.program.run_dir} cannot be written ({error}); give another with "
            "--set job.run_dir=FOLDER (--run-dir with --script), or make room there"
        ) from None


def _start(job: Job, backend: Backend | None) -> Started:
    token_file = job.folder / "token"
    server: Server | None = None

    def agents_backend() -> Backend:
        if backend is not None:
            return backend
        assert server is not None, "the server listens first"
        command = (sys.executable, "-m", "megascale.cluster.agent")
        run_dir = str(job.program.run_dir)
        begin = AgentStart(command, server.url, str(token_file), run_dir)
        policy = job.policy
        return make_backend(
            job.backend,
            begin,
            procs_per_node=policy.procs_per_node,
            spares=policy.spares,
            options=job.backend_options,
        )

    driver = Driver(job.policy, agents_backend, job.program, folder=job.folder)
    try:
        token = make_token(token_file)
        server = Server(
            driver.desk,
            token,
            run_dir=str(job.program.run_dir),
            job_clock=lambda: driver.job_s,
            check_update=lambda new: _check_update(job, driver.desk.job.overrides, new),
            host=job.host,
            port=_port(job, comes_back=driver.is_restart),
        )
        _remember(job, server)
        if not driver.is_restart:
            takeover.remember(job.folder, job.settings)
        server.start()
    except BaseException:
        driver.abandon()
        raise
    return Started(driver, server, token_file)


def _remember(job: Job, server: Server) -> None:
    text = json.dumps({"url": server.url, "host": server.host, "port": server.port})
    (job.folder / "address.json").write_text(text + "\n")


def _port(job: Job, *, comes_back: bool) -> int:
    """That of an ended job is taken again where it is free; it may be somebody else's by now."""
    before = takeover.port_before(job.folder)
    if job.port or comes_back or not before:
        return job.port or before
    try:
        check_address(job.host, before)
    except LaunchError:
        return 0
    return before


def _check_update(job: Job, earlier: Sequence[str], overrides: Sequence[str]) -> None:
    """Raises ConfigError for overrides that the next epoch could not start with.

    earlier  those of the updates before
    """
    if job.config is None or job.recipe is None:
        raise ConfigError("a script has no configuration to update; stop it and start it anew")
    config = load_config(job.recipe, [*job.overrides, *earlier, *overrides])
    config.mesh(job.policy.num_nodes * job.policy.procs_per_node)
    old, new = (takeover.flat(one.model_dump(mode="json")) for one in (job.config, config))
    changed = [key for key in new if old.get(key) != new[key]]
    fixed = [key for key in changed if takeover.is_fixed(key)]
    if fixed:
        told = ", ".join(f"{key} ({old.get(key)!r} to {new[key]!r})" for key in fixed[:8])
        raise ConfigError(
            f"{told} cannot change while the job runs; [cluster] changes when the driver is ended "
            "and started again, the rest of a run is a new run's"
        )
