"""Steps that are as long as the host took to launch them: the host is the bottleneck.

The host launches a step ahead of the device, in less time than the device needs for it. Where
launching took nearly as long as the step, the step moves with whatever else the host does. On a CPU
both are one, and nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.telemetry.shown import percent, seconds
from megascale.telemetry.store.run import Run

HELD = 0.9  # of a step's time spent launching it; between steps the host has other work
WORTH_TELLING = 0.05  # of the steps


@dataclass(frozen=True)
class HostHeld:
    """share  of all ranks' steps; launch_ms, step_ms: medians."""

    share: float
    launch_ms: float
    step_ms: float

    def told(self) -> str:
        return (
            f"in {percent(self.share)} of the steps the host took as long to launch them as they "
            f"took (usually {seconds(self.launch_ms / 1e3)} of {seconds(self.step_ms / 1e3)})"
        )


def host_held(run: Run, first: int, last: int) -> HostHeld | None:
    """None where no step was timed by a device, or too few were held up to tell of."""
    found = run.query(
        "SELECT avg((launch_ns >= ? * dur_ns)::INT) AS share, "
        "median(launch_ns) / 1e6 AS launch_ms, median(dur_ns) / 1e6 AS step_ms FROM steps "
        "WHERE clock = 'device' AND launch_ns IS NOT NULL AND step BETWEEN ? AND ?",
        [HELD, first, last],
    ).to_pylist()[0]
    if found["share"] is None or found["share"] < WORTH_TELLING:
        return None
    return HostHeld(**found)
