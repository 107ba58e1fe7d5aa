"""What a driver must have in common with the one whose job it takes over."""

from __future__ import annotations

from megascale.cluster.transitions import Policy
from megascale.errors import ConfigError


def check_same_job(old: Policy, new: Policy) -> None:
    """Raises ConfigError: ranks that run on were numbered for the shape that the job began with."""
    if (old.num_nodes, old.procs_per_node) != (new.num_nodes, new.procs_per_node):
        raise ConfigError(
            f"this folder holds an unfinished job of {old.num_nodes} nodes with "
            f"{old.procs_per_node} ranks each, this start has {new.num_nodes} with "
            f"{new.procs_per_node}; take it over with --nodes {old.num_nodes} --procs-per-node "
            f"{old.procs_per_node}, or stop it first and go on with --resume"
        )
