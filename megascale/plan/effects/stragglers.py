"""Nodes that are slow and ranks that waver: how much longer a step is (MegaScale 5.1, 6.3).

A step ends when its slowest pipeline ends. Of the paper: about 0.5 % of the machines take about
10 % longer for the same forward, and without them MFU is 0.7 points higher. Around that stands
what all machines do: chips differ a little, and a step is never as long as the last.

Model. A node is slow with chance `slow_share` for the whole job; a rank's chip deviates by
`chip_sd`; in each step its host by one part of `step_sd` and the rank itself by the other (the
shape of the noise that faults are tested under, without its pauses, which `launch_skew.py` has).
Tensor ranks wait for each other in every layer, so a stage takes its slowest rank's time. A
pipeline of p stages, v chunks and m micro-batches takes, relative to the nominal one,

    (m max(x) + (sum(x) - max(x)) / v) / (m + (p - 1) / v)

and the step the largest of its pipelines' times. Drawn jobs by drawn steps, seeded; `approximate`
is the closed form by the mean of the largest of n normals.

Fitted: one constant, `exposed`, the share of a slow node's delay that its step feels. Of 1,536
nodes some are always slow (7.7 on average), so that a step that felt all of it would lose 8 %, and
the cure would be worth 4 points of MFU instead of 0.7. `EXPOSED` is fitted so that it is worth 0.7
points at 55.2 % on 12,288 GPUs. The paper prints neither the job nor its size, and there is another
reading, `exposed=1`, which fits nothing: of runs on 32 nodes (256 GPUs) one in seven has a slow
node, and the mean over such runs gains 0.6 points without it. The deviations are chosen, none of
them is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError
from megascale.plan.effects.interval import Interval, check_count, check_number, interval_of
from megascale.topology import Mesh

PAPER_SLOW_SHARE = 0.005
PAPER_SLOW_BY = 0.10
PAPER_GAIN = 0.7 / (55.2 - 0.7)  # of the step's time, by the eviction of slow nodes
EXPOSED = 0.307  # fitted by `fit_exposed` on PAPER_GAIN, 1,536 nodes, the deviations below


@dataclass(frozen=True)
class Wavering:
    """How ranks' times of computing deviate, all as shares of the time.

    exposed     share of a slow node's delay that its step feels; fitted, see the module
    host_share  share of the variance of `step_sd` that all ranks of a node have in common
    """

    slow_share: float = PAPER_SLOW_SHARE
    slow_by: float = PAPER_SLOW_BY
    exposed: float = EXPOSED
    chip_sd: float = 0.003
    step_sd: float = 0.01
    host_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("slow_share", "exposed", "host_share"):
            check_number(name, getattr(self, name), least=0.0, most=1.0)
        check_number("slow_by", self.slow_by, least=0.0)
        for name in ("chip_sd", "step_sd"):
            check_number(name, getattr(self, name), least=0.0, most=0.3)

    @property
    def evicted(self) -> Wavering:
        """The same without slow nodes: they were found and replaced."""
        return replace(self, slow_share=0.0)


@dataclass(frozen=True)
class PipelineDepth:
    """What decides how much of one stage's delay a pipeline feels."""

    micro_batches: int
    virtual: int = 1

    def __post_init__(self) -> None:
        check_count("micro_batches", self.micro_batches)
        check_count("virtual", self.virtual)


def simulate(
    mesh: Mesh,
    depth: PipelineDepth,
    devices_per_node: int,
    wavering: Wavering,
    *,
    seed: int,
    num_jobs: int = 40,
    num_steps: int = 8,
) -> Interval:
    """Factor of a step's computing time over a typical rank's alone: over jobs, mean and range."""
    check_count("devices_per_node", devices_per_node)
    check_count("num_jobs", num_jobs)
    check_count("num_steps", num_steps)
    rng = np.random.default_rng(seed)
    rank_node = np.arange(mesh.world_size) // devices_per_node
    factors = [
        _mean_step(mesh, depth, rank_node, wavering, rng, num_steps) for _ in range(num_jobs)
    ]
    return interval_of(np.maximum(1.0, np.array(factors)))


def _mean_step(
    mesh: Mesh,
    depth: PipelineDepth,
    rank_node: NDArray[np.int64],
    wavering: Wavering,
    rng: np.random.Generator,
    num_steps: int,
) -> float:
    """One job: its slow nodes and chips stay, its steps differ."""
    num_ranks, num_nodes = len(rank_node), int(rank_node[-1]) + 1
    slow_node = rng.random(num_nodes) < wavering.slow_share
    delay = slow_node * (wavering.slow_by * wavering.exposed)
    lasting = (1.0 + delay[rank_node]) * (1.0 + rng.normal(0.0, wavering.chip_sd, num_ranks))
    host_sd = wavering.step_sd * math.sqrt(wavering.host_share)
    own_sd = wavering.step_sd * math.sqrt(1.0 - wavering.host_share)
    host = rng.normal(0.0, host_sd, (num_steps, num_nodes))
    passing = host[:, rank_node] + rng.normal(0.0, own_sd, (num_steps, num_ranks))
    time = lasting * (1.0 + passing)
    shape = (num_steps, mesh.pipeline, mesh.data, mesh.tensor)  # tensor fastest, then data
    stage = time.reshape(shape).max(axis=3)
    return float(_of_pipelines(stage, depth).max(axis=1).mean())


def _of_pipelines(stage: NDArray[np.float64], depth: PipelineDepth) -> NDArray[np.float64]:
    """Relative time of each pipeline, from its stages' on axis 1."""
    slowest = stage.max(axis=1)
    filling = (stage.sum(axis=1) - slowest) / depth.virtual
    nominal = depth.micro_batches + (stage.shape[1] - 1) / depth.virtual
    return np.asarray((depth.micro_batches * slowest + filling) / nominal)


def approximate(
    mesh: Mesh, depth: PipelineDepth, devices_per_node: int, wavering: Wavering
) -> float:
    """Closed form of `simulate`'s mean, for searches: the largest of as many normals as nodes.

    A slow node's delay is added to the largest of the healthy ones' where it is above it.
    """
    check_count("devices_per_node", devices_per_node)
    ranks = min(mesh.tensor, devices_per_node)
    num_nodes = -(-mesh.world_size // devices_per_node)
    own_sd = math.hypot(wavering.chip_sd, wavering.step_sd * math.sqrt(1 - wavering.host_share))
    host_sd = wavering.step_sd * math.sqrt(wavering.host_share)
    stages = mesh.world_size // ranks
    node_sd = math.hypot(host_sd, own_sd * _largest_sd(ranks))
    middle = own_sd * largest_normal(ranks)
    healthy = middle + node_sd * largest_normal(stages)
    slow = _with_slow_nodes(wavering, num_nodes, middle, healthy, node_sd)
    p, m, v = mesh.pipeline, depth.micro_batches, depth.virtual
    share = m / (m + (p - 1) / v)  # of the time that the slowest stage sets; the rest is the mean's
    return 1.0 + share * slow + (1.0 - share) * middle


def _with_slow_nodes(
    wavering: Wavering, num_nodes: int, middle: float, healthy: float, node_sd: float
) -> float:
    """Mean of the larger of the slowest healthy and the slowest slow node, over their number."""
    delay = wavering.slow_by * wavering.exposed
    found, left = 0.0, 1.0
    for number in range(num_nodes + 1):
        chance = math.exp(
            math.lgamma(num_nodes + 1)
            - math.lgamma(number + 1)
            - math.lgamma(num_nodes - number + 1)
            + number * _log(wavering.slow_share)
            + (num_nodes - number) * _log(1.0 - wavering.slow_share)
        )
        slowest = middle + delay + node_sd * largest_normal(max(1, number))
        found += chance * (max(healthy, slowest) if number else healthy)
        left -= chance
        if left < 1e-9:
            break
    return found


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -1e9


def largest_normal(number: int) -> float:
    """Mean of the largest of `number` standard normals; Blom's approximation (1958), to 0.02."""
    check_count("number", number)
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0


def _largest_sd(number: int) -> float:
    """Its standard deviation, from the limit law of extremes: pi / sqrt(6) over its scale."""
    if number == 1:
        return 1.0
    return math.pi / math.sqrt(6.0) / math.sqrt(2.0 * math.log(number) + 1.645)


def fit_exposed(
    mesh: Mesh,
    depth: PipelineDepth,
    devices_per_node: int,
    wavering: Wavering,
    *,
    gain: float = PAPER_GAIN,
    seed: int = 0,
) -> float:
    """The `exposed` with which evicting slow nodes shortens the step by `gain`; by bisection."""
    check_number("gain", gain, least=0.0, above=True)
    without = simulate(mesh, depth, devices_per_node, wavering.evicted, seed=seed).value

    def gained(exposed: float) -> float:
        slow = replace(wavering, exposed=exposed)
        return simulate(mesh, depth, devices_per_node, slow, seed=seed).value / without - 1.0

    if gained(1.0) < gain:
        raise ConfigError(
            f"evicting nodes that are slow by {wavering.slow_by:.0%} gains {gained(1.0):.2%} at "
            f"most here, not {gain:.2%}; legal is a gain up to that, or a larger slow_by"
        )
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2.0
        low, high = (middle, high) if gained(middle) < gain else (low, middle)
    return (low + high) / 2.0
