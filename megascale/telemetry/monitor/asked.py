"""The node's end of `megascale monitor --everywhere`: its first rank looks for requests.

A thread looks once a second (one stat). What is asked runs in a child process; the rank itself does
nothing but wait for it on that thread, and tells in an answer file how it went.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from megascale.errors import DataError, MegascaleError
from megascale.telemetry.monitor.command import (
    Monitoring,
    finish_child,
    node_file,
    start_child,
)
from megascale.telemetry.requests import (
    Answer,
    Request,
    parse_request,
    requests_folder,
    write_answer,
)

_log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
_CLOSE_S = 5.0

Run = Callable[[Path, Monitoring], object]


def run_child(run_dir: Path, what: Monitoring) -> object:
    return finish_child(start_child(run_dir, what), what.limit_s)


class MonitorRequests:
    """Obeys requests that come while the context is entered.

    ranks  the global ranks of this node, the first of which answers
    run    what samples; a test hands in its own
    """

    def __init__(self, run_dir: Path, ranks: range, *, run: Run = run_child) -> None:
        self._run_dir, self._ranks, self._run_child = run_dir, ranks, run
        self._folder = requests_folder(run_dir)
        self._seen = {path.stem for path in self._files()}  # of an earlier start
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor requests", daemon=True)

    def __enter__(self) -> MonitorRequests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_CLOSE_S)  # a child that still samples goes on and writes its file

    def _files(self) -> list[Path]:
        try:
            return sorted(self._folder.glob("[!.]*.json"))
        except OSError:
            return []

    def _run(self) -> None:
        changed_ns: int | None = None
        while not self._ended.wait(LOOK_INTERVAL_S):
            try:
                now_ns = self._folder.stat().st_mtime_ns
            except OSError:
                continue
            if now_ns == changed_ns:
                continue
            changed_ns = now_ns
            for path in self._files():
                if path.stem not in self._seen:
                    self._seen.add(path.stem)
                    self._obey(path)

    def _obey(self, path: Path) -> None:
        try:
            request = parse_request(path.stem, path.read_text(errors="replace"))
        except (DataError, OSError):
            return  # ranks say what is wrong with it
        if request.what != "monitor" or not any(map(request.is_for, self._ranks)):
            return
        try:
            self._run_child(self._run_dir, Monitoring())
        except (MegascaleError, OSError) as error:
            self._answer(request, Answer(self._ranks[0], "refused", str(error)))
        else:
            file = node_file(self._run_dir).relative_to(self._run_dir)
            self._answer(request, Answer(self._ranks[0], "done", path=str(file)))

    def _answer(self, request: Request, answer: Answer) -> None:
        try:
            write_answer(self._run_dir, request.name, answer)
        except OSError as error:
            _log.warning("request %s is not answered: %s", request.name, error)
