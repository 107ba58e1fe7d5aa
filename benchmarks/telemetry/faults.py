"""Faults to plant in a synthetic run, each as data; what it does is in `synthetic_times.py` and
`synthetic_tables.py`. Shares are of a step's usual compute time; a fault lasts from `from_step` on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlowRank:
    """One rank computes slower than its peers."""

    rank: int
    share: float = 0.10
    from_step: int = 1


@dataclass(frozen=True)
class SlowHost:
    """All ranks of one host compute slower (MegaScale 6.3: about 10 %)."""

    host: int
    share: float = 0.10
    from_step: int = 1


@dataclass(frozen=True)
class LateLauncher:
    """One rank starts the gradient reduce-scatter late, by this share of the compute time."""

    rank: int
    share: float = 0.05
    from_step: int = 1


@dataclass(frozen=True)
class Drift:
    """A phase takes `per_step` more of its first time with every step: forward, backward,
    optimizer, data_wait, grad_sync or param_gather."""

    phase: str
    per_step: float = 0.002
    from_step: int = 1
    ranks: tuple[int, ...] | None = None  # None: all


@dataclass(frozen=True)
class GarbageGrowth:
    """Ranks pause at random before the gradient reduce-scatter, longer and longer (phase "gc"):
    what made MegaScale's MFU decrease (6.3)."""

    per_step: float = 0.001  # of the compute time, mean length of a pause, more with every step
    chance: float = 0.3  # of a rank in a step
    from_step: int = 1


@dataclass(frozen=True)
class Congestion:
    """The network of one host is slow: its transfers take `factor` times as long, and its port
    counts marks of congestion."""

    host: int
    factor: float = 3.0
    from_step: int = 1


@dataclass(frozen=True)
class MemoryPressure:
    """Ranks of one host allocate at the edge: retries, slower steps, and an out-of-memory in the
    last step."""

    host: int
    share: float = 0.10
    from_step: int = 1


@dataclass(frozen=True)
class Restart:
    """The job dies after `at_step` and goes on behind `back_to`, `pause_s` later."""

    at_step: int
    back_to: int
    pause_s: float = 60.0


@dataclass(frozen=True)
class LossSpike:
    """The loss is higher by `height` in `num_steps` steps."""

    step: int
    height: float = 2.0
    num_steps: int = 5


@dataclass(frozen=True)
class Hang:
    """Behind the last step `silent` ranks stop before a collective of `group` ("tensor", "data",
    "pipeline", "world"); all others record what they are in."""

    silent: tuple[int, ...]
    group: str = "data"


Fault = (
    SlowRank
    | SlowHost
    | LateLauncher
    | Drift
    | GarbageGrowth
    | Congestion
    | MemoryPressure
    | Restart
    | LossSpike
    | Hang
)
