"""What NVML says of the node's GPUs, from a child that is killed when it does not answer in time.

A driver that hangs (NVSentinel#1576) blocks the child, perhaps beyond SIGKILL, and nothing else:
the devices are reported as not answering, and another child tries again later. Children that do not
even die are left behind, `MOST_LEFT` of them, then nobody asks any more. Where there is no NVML
there are no devices, and that is no error.
"""

from __future__ import annotations

import json
import logging
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megascale.cluster.agent.birth_command import birth
from megascale.cluster.agent.board import Board
from megascale.cluster.messages import DeviceReport

INTERVAL_S = 1.0
DEADLINE_S = 5.0  # of one answer; the first has NVML's start in it
AGAIN_S = 10.0  # after a child that did not answer
DIES_WITHIN_S = 1.0
MOST_LEFT = 3
_ANSWER_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class NoNvml(Exception):
    """There is none on this node."""


class NvmlChild:
    """One child and its answers; for one thread."""

    def __init__(self, fake: Path | None) -> None:
        command = [*birth(), sys.executable, "-m", "megascale.cluster.agent.device_child"]
        self._process = subprocess.Popen(
            [*command, *([str(fake)] if fake else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def ask(self, deadline_s: float) -> list[dict[str, Any]]:
        """Facts of each device. Raises TimeoutError, OSError if it died, NoNvml."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        give_up_s, answer = time.monotonic() + deadline_s, b""
        while not answer.endswith(b"\n"):
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                raise TimeoutError(f"no answer in {deadline_s:.0f} s")
            data = process.stdout.read(_ANSWER_BYTES)
            if not data or len(answer) > _ANSWER_BYTES:
                raise BrokenPipeError("the child that asks NVML ended")
            answer += data
        found = json.loads(answer)
        if "missing" in found:
            raise NoNvml(found["missing"])
        devices: list[dict[str, Any]] = found["devices"]
        return devices

    def end(self) -> bool:
        """Kill it; False where it does not die."""
        self._process.kill()
        try:
            self._process.wait(DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            return False
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return True


class DeviceMonitor(threading.Thread):
    """Asks each second and puts it on the board. `names` once `has_answered`."""

    def __init__(self, board: Board, fake: Path | None, *, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(name="devices", daemon=True)
        self.names: list[str] = []
        self.has_answered = threading.Event()
        self._board, self._fake, self._deadline_s = board, fake, deadline_s
        self._known: list[DeviceReport] = []
        self._num_left = 0
        self._ended = threading.Event()

    def end(self, timeout_s: float) -> None:
        self._ended.set()
        self.join(timeout_s)

    def run(self) -> None:
        while not self._ended.is_set() and self._num_left < MOST_LEFT:
            child = NvmlChild(self._fake)
            try:
                self._ask_until_it_fails(child)
            except NoNvml as reason:
                _log.info("no devices: %s", reason)
                return
            except (OSError, ValueError) as error:
                _log.warning("NVML: %s", error)
                self._board.see_devices(self._unanswered())
            finally:
                self.has_answered.set()
                self._num_left += not child.end()
            self._ended.wait(AGAIN_S)
        if self._num_left >= MOST_LEFT:
            _log.error("%d children hang in NVML; it is not asked any more", self._num_left)

    def _ask_until_it_fails(self, child: NvmlChild) -> None:
        while not self._ended.is_set():
            facts = child.ask(self._deadline_s)
            self.names = [str(device.pop("name", "GPU")) for device in facts]
            self._known = [DeviceReport.model_validate(device) for device in facts]
            self._board.see_devices(self._known)
            self.has_answered.set()
            self._ended.wait(INTERVAL_S)

    def _unanswered(self) -> list[DeviceReport]:
        """The devices that there were, or those that the driver has files for."""
        if self._known:
            return [DeviceReport(index=d.index, uuid=d.uuid, answered=False) for d in self._known]
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if self._fake is not None:
            count = len(json.loads(self._fake.read_text())["devices"])
        return [DeviceReport(index=index, answered=False) for index in range(count)]
