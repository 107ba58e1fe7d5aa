"""How a job on several nodes is watched and healed (`megascale run`; MegaScale 4).

Deadlines nest: a heartbeat, a suspicion, a loss, and all of them before a collective gives up by
itself (`comm.timeout_s`), so that the driver names the rank before its peers fail with a timeout
that names nobody.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from megascale.config.base import Section

LOST_MARGIN_S = 2.0


class ClusterConfig(Section):
    """Driver, agents, deadlines, budgets."""

    heartbeat_interval_s: float = Field(1.0, ge=0.05, description="agent to driver")
    suspect_after_s: float = Field(3.0, gt=0.0, description="silence of a node")
    flap_tolerance_s: float = Field(
        10.0, gt=0.0, description="silence that a link may have; a node is lost 2 s later"
    )
    orphan_timeout_s: float = Field(
        600.0, gt=0.0, description="how long agents train on without a driver"
    )
    init_deadline_s: float = Field(
        300.0, gt=0.0, description="from a rank's start to its first step"
    )
    first_step_deadline_s: float = Field(600.0, gt=0.0, description="compilation is in it")
    step_deadline_s: float = Field(
        10.0, gt=0.0, description="without progress; raised to 5 times the median step"
    )
    save_deadline_s: float = Field(600.0, gt=0.0, description="in a checkpoint or a validation")
    save_progress_deadline_s: float = Field(
        60.0, gt=0.0, description="in a checkpoint in which no rank moves a tensor or a block more"
    )
    grace_s: float = Field(
        5.0,
        ge=0.0,
        description="between asking a rank to end and ending it; a trainer that is not to save has "
        "1 s at most",
    )
    kill_deadline_s: float = Field(
        10.0, gt=0.0, description="an ended rank that is still there then condemns its host"
    )
    straggler_share: float = Field(
        0.05, gt=0.0, lt=1.0, description="slower than its peers by this share of the time"
    )
    straggler_window: int = Field(30, ge=5, description="steps")
    straggler_windows: int = Field(3, ge=1, description="in a row, before a node is evicted")
    straggler_least_s: float = Field(
        15.0, ge=0.0, description="slow for as long, before a node is evicted"
    )
    loss_spike: float = Field(
        0.0, ge=0.0, description="nats above the median of 50 steps that are a fault; 0: none"
    )
    nic_settings: Literal["warn", "evict"] = Field(
        "warn", description="a node whose ports are set otherwise than most"
    )
    max_restarts: int = Field(100, ge=0, description="whatever the cause")
    max_restarts_a_cause: int = Field(
        20, ge=0, description="out of memory and a full disk have one restart"
    )
    restart_window_steps: int = Field(
        1000, ge=1, description="so many new steps after its last restart, a cause has all again"
    )
    max_same_fault: int = Field(
        2, ge=1, description="the same fault at the same step, before the job stops with a report"
    )
    topology: str = Field(
        "",
        description="TOML file of switches and their nodes: ranks are placed so that heavy groups "
        "are under one switch; empty: by what the scheduler says of switches",
    )
    spares: int = Field(0, ge=0, description="nodes kept warm beside those that train")
    shrink: bool = Field(
        True, description="without a spare, go on with fewer data-parallel replicas"
    )
    selfcheck: Literal["off", "light", "full"] = Field(
        "light", description="before a node joins and after a fault"
    )
    warm: Literal["off", "spares", "all"] = Field(
        "all",
        description="a process a rank, and one for the self-check, that has imported torch and "
        "waits, so that a restart takes a third of the time: about 250 MB of host memory a node "
        "and 5 MB a rank; spares: on nodes without ranks",
    )

    @property
    def lost_after_s(self) -> float:
        return self.flap_tolerance_s + LOST_MARGIN_S

    @model_validator(mode="after")
    def _deadlines_nest(self) -> ClusterConfig:
        order = (
            ("heartbeat_interval_s", self.heartbeat_interval_s),
            ("suspect_after_s", self.suspect_after_s),
            ("flap_tolerance_s", self.flap_tolerance_s),
            ("orphan_timeout_s", self.orphan_timeout_s),
        )
        for (below, low), (above, high) in pairwise(order):
            if low >= high:
                raise ValueError(
                    f"cluster.{below} {low:g} is not below cluster.{above} {high:g}; a deadline "
                    "that passes before the one inside it judges nothing: raise the outer one"
                )
        return self
