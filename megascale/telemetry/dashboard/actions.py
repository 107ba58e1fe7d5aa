"""What a person may do with the token: take a node out of the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megascale.telemetry.dashboard.driver import Driver


class EvictRequest(BaseModel):
    """block: the node does not come back into this job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str = Field(min_length=1, max_length=200)
    reason: str = Field(min_length=1, max_length=300)
    block: bool = True


def evict(driver: Driver, message: EvictRequest) -> Mapping[str, Any]:
    """LaunchError: the driver does not answer; RefusedByDriverError: it will not."""
    accepted = driver.evict(message.node, message.reason, block=message.block)
    epoch = accepted.get("epoch")
    return {
        "epoch": epoch,
        "told": f"The driver has it (epoch {epoch}); what comes of it is in the overview.",
    }
