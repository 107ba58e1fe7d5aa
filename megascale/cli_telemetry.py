"""The verbs that look at a run: `diagnose`, `dashboard`, `trace`, `profile`, `monitor`, `stream`.

Each is a few lines; what it does is in `megascale.telemetry`.
"""

from __future__ import annotations
