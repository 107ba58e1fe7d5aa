"""The network's shape: which node hangs on which switch (MegaScale 3.6). A TOML file, or a table.

    rails = 8               # switches that a node's NICs go to: NIC i to switch i of a set
    uplinks = 32            # of a switch; default: as many as its nodes need, 1:1
    nics_per_uplink = 2     # at full rate; 2 where ports are split, as in the paper
    queue_pairs = 1         # hashes that one flow is spread over

    [[switch]]              # or the set of switches of all rails
    name = "tor-0"
    pod = "pod-0"           # optional: what hangs on one group of upper switches
    nodes = ["gpu[000-063]"]

or, a node at a time, `[[node]]` with `name`, `switch` and, where wanted, `pod`. Both may be mixed.
Names are those of the machines, as Slurm, Kubernetes or `hostname` have them.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale.errors import ConfigError
from megascale.plan.effects.ecmp import Uplinks
from megascale.plan.placement.hosts import expand, natural

NIC_GBPS = 200.0  # any number: only the ratio to an uplink counts


@dataclass(frozen=True)
class Switch:
    """A switch, or the set of switches of all rails, and the nodes on it in their order."""

    name: str
    nodes: tuple[str, ...]
    pod: str = ""


@dataclass(frozen=True)
class Topology:
    """Switches in the file's order; every node is on one."""

    switches: tuple[Switch, ...]
    rails: int = 1
    num_uplinks: int | None = None
    nics_per_uplink: float = 2.0
    queue_pairs: int = 1

    def __post_init__(self) -> None:
        twice = [node for node, n in Counter(self.nodes).items() if n > 1]
        if twice:
            raise ConfigError(
                f"topology: {_names(twice)} on more than one switch, or twice on one; legal is "
                "each node once"
            )
        if not self.nodes:
            raise ConfigError("topology: no node; give [[switch]] tables with name and nodes")

    @property
    def nodes(self) -> list[str]:
        return [node for switch in self.switches for node in switch.nodes]

    @property
    def switch_of(self) -> dict[str, str]:
        return {node: switch.name for switch in self.switches for node in switch.nodes}

    @property
    def uplinks(self) -> Uplinks:
        """Of a switch of the largest size; by default as many as carry what its nodes send."""
        most = max(len(switch.nodes) for switch in self.switches)
        number = self.num_uplinks or max(1, -int(-most // self.nics_per_uplink))
        return Uplinks(number, NIC_GBPS * self.nics_per_uplink, NIC_GBPS, self.queue_pairs)

    def of(self, nodes: list[str]) -> Topology:
        """The part that `nodes` hang on. Raises ConfigError naming those that are not in it."""
        twice = [node for node, n in Counter(nodes).items() if n > 1]
        if twice:
            raise ConfigError(f"the job has {_names(twice)} more than once; legal is each once")
        known = set(self.nodes)
        missing = [node for node in nodes if node not in known]
        if missing:
            raise ConfigError(
                f"topology: {_names(missing)} missing; the file has {_names(self.nodes)}: add "
                "what is missing to a [[switch]]"
            )
        wanted = set(nodes)
        parts = [
            Switch(s.name, tuple(node for node in s.nodes if node in wanted), s.pod)
            for s in self.switches
        ]
        return Topology(
            tuple(part for part in parts if part.nodes),
            self.rails,
            self.uplinks.num_links,
            self.nics_per_uplink,
            self.queue_pairs,
        )


def topology_of(switch_of: Mapping[str, str | None]) -> Topology:
    """From what a scheduler knows: node -> switch. Nodes of no known switch are on one together."""
    nodes: dict[str, list[str]] = {}
    for node in sorted(switch_of, key=natural):
        nodes.setdefault(switch_of[node] or "", []).append(node)
    switches = (Switch(name, tuple(nodes[name])) for name in sorted(nodes, key=natural))
    return Topology(tuple(switches))


class _SwitchTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1)
    nodes: list[str] = Field(min_length=1)
    pod: str = ""


class _NodeTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1)
    switch: str = Field(min_length=1)
    pod: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    rails: int = Field(1, ge=1)
    uplinks: int | None = Field(None, ge=1)
    nics_per_uplink: float = Field(2.0, gt=0.0, allow_inf_nan=False)
    queue_pairs: int = Field(1, ge=1)
    switch: list[_SwitchTable] = []
    node: list[_NodeTable] = []


def load_topology(path: Path | str) -> Topology:
    """Read a topology file. Raises ConfigError naming what is wrong in it."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"topology file {file} does not exist; give a TOML file with [[switch]] tables "
            "(docs/cluster-effects.md)"
        )
    try:
        values = _File.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        return _topology(values)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"topology file {file} does not parse: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"topology file {file}: {_render(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _topology(values: _File) -> Topology:
    nodes: dict[str, list[str]] = {}
    pods: dict[str, str] = {}
    for table in values.switch:
        if table.name in nodes:
            raise ConfigError(f"switch {table.name!r} is there twice; give all its nodes in one")
        nodes[table.name] = [name for text in table.nodes for name in expand(text)]
        pods[table.name] = table.pod
    for node in values.node:
        nodes.setdefault(node.switch, []).append(node.name)
        if pods.setdefault(node.switch, node.pod) != node.pod:
            raise ConfigError(
                f"node {node.name!r} puts switch {node.switch!r} into pod {node.pod!r}, which is "
                f"in {pods[node.switch]!r}; a switch is in one pod"
            )
    switches = tuple(Switch(name, tuple(found), pods[name]) for name, found in nodes.items())
    return Topology(
        switches, values.rails, values.uplinks, values.nics_per_uplink, values.queue_pairs
    )


def _render(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        got = problem.get("input")
        shown = "" if isinstance(got, dict) else f", got {got!r}"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where} is unknown; legal keys are those of docs/cluster-effects.md")
        else:
            lines.append(f"{where}: {problem['msg']}{shown}")
    return "; ".join(lines)


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
