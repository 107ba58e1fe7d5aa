"""Who has the machines (docs/add-a-backend.md): a file each, one contract suite for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megascale.cluster.backends import kubernetes, local, slurm
from megascale.cluster.backends.base import AgentStart, Backend, Sizes
from megascale.cluster.backends.kubernetes import KubernetesBackend
from megascale.cluster.backends.local import LocalBackend
from megascale.cluster.backends.slurm import SlurmBackend
from megascale.errors import LaunchError


def _local(start: AgentStart, _sizes: Sizes, options: Mapping[str, Any]) -> Backend:
    return LocalBackend(start, options)


BACKENDS: dict[str, Callable[[AgentStart, Sizes, Mapping[str, Any]], Backend]] = {
    "local": _local,
    "slurm": SlurmBackend,
    "kubernetes": KubernetesBackend,
}


# Raise LaunchError for options that a job of so many nodes cannot start with, and for what this
# machine lacks. They make nothing.
CHECKS: dict[str, Callable[[Mapping[str, Any], int], None]] = {
    "local": local.check,
    "slurm": slurm.check,
    "kubernetes": kubernetes.check,
}


def check_backend(
    name: str,
    *,
    num_nodes: int,
    procs_per_node: int = 1,
    spares: int = 0,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Raises LaunchError as `make_backend` would, and where `num_nodes` cannot be had at all."""
    _check(name, procs_per_node, spares)
    if name in CHECKS:
        CHECKS[name](options or {}, num_nodes)


def make_backend(
    name: str,
    start: AgentStart,
    *,
    procs_per_node: int = 1,
    spares: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Backend:
    """The backend `name` for one job; nothing is started. `options`: see its Options section.

    LaunchError for an unknown name, an unknown option or an illegal value.
    """
    _check(name, procs_per_node, spares)
    return BACKENDS[name](start, Sizes(procs_per_node, spares), options or {})


def _check(name: str, procs_per_node: int, spares: int) -> None:
    if name not in BACKENDS:
        raise LaunchError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    if procs_per_node < 1 or spares < 0:
        raise LaunchError(
            f"{procs_per_node} processes a node and {spares} spares; at least 1 and 0 are legal"
        )
