"""Detectors and readers: pure functions from what was recorded to findings (MegaScale 4.3, 5).

No clock, no file, no network: time is in what they are given. The driver asks the detectors while
a job runs, and the command line and the dashboard ask the same functions of a run that has ended.

To add one: a file like its siblings, a row in DETECTORS, a page is in docs/add-a-detector.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megascale.telemetry.diagnose.hang import localise
from megascale.telemetry.diagnose.late import late_launchers
from megascale.telemetry.diagnose.nic_health import dark_optics, erring_ports
from megascale.telemetry.diagnose.nic_settings import differing_settings, flapping_links
from megascale.telemetry.diagnose.numerics import loss_spike, nonfinite
from megascale.telemetry.diagnose.replicas import differing_replicas
from megascale.telemetry.diagnose.straggler import stragglers
from megascale.telemetry.diagnose.traffic import changed, stopped

DETECTORS: Mapping[str, Callable[..., Any]] = {
    "hang": localise,
    "straggler": stragglers,
    "traffic_stopped": stopped,
    "traffic_changed": changed,
    "nic_settings": differing_settings,
    "link_flap": flapping_links,
    "nic_errors": erring_ports,
    "nic_light": dark_optics,
    "nonfinite": nonfinite,
    "loss_spike": loss_spike,
    "replicas_differ": differing_replicas,
    "late_launch": late_launchers,
}
"""Detectors by name; each gives a Finding, a list of them, or None, and says what it takes."""
