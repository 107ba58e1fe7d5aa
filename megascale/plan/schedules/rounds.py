"""A round: the computes of a stage between two exchanges with its neighbours.

A schedule's generator decides what is computed in which order, and where rounds end; transfers are
inserted afterwards (`transfers.py`). Rounds matter for coupled transfers only.
"""

from __future__ import annotations

from megascale.plan.actions import Action

Round = tuple[Action, ...]
