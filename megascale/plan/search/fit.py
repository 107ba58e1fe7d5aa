"""What fits in memory, and what is missing where nothing does."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from megascale.errors import ConfigError
from megascale.plan.case import Layout
from megascale.plan.columns import Floats
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.usable import usable_bytes
from megascale.plan.memory import RankMemory
from megascale.plan.search.explain import describe_layout, describe_switches
from megascale.plan.search.question import Question, stage_memory
from megascale.plan.search.space import Space, legal_layouts
from megascale.plan.step_memory import step_memory
from megascale.units import format_bytes

_DOUBLINGS = 12


def most_bytes(question: Question, space: Space) -> Floats:
    """Memory of each layout on its fullest stage."""
    found = np.empty(len(space))
    for chosen, part, software in question.by_software(space):
        found[chosen] = step_memory(question.job, software, part).max(axis=0)
    return found


def does_not_fit(question: Question, layout: Layout, limit: float) -> str:
    stage, memory = fullest(question, layout)
    return (
        f"{describe_layout(layout)} needs {format_bytes(memory.total_bytes)} on stage {stage}, "
        f"{format_bytes(limit)} may be used"
    )


def fullest(question: Question, layout: Layout) -> tuple[int, RankMemory]:
    """The stage that holds most."""
    stages = stage_memory(question.case(layout))
    return max(enumerate(stages), key=lambda one: one[1].total_bytes)


def nothing_fits(question: Question, cluster: Cluster, space: Space, memory: Floats) -> ConfigError:
    """The error: the least that any layout needs, of what, and how many GPUs would be enough."""
    least = space.layout(int(np.argmin(memory)))
    stage, held = fullest(question, least)
    limit = usable_bytes(cluster.device)
    missing = held.total_bytes - limit
    return ConfigError(
        f"none of {len(space):,} layouts on {question.num_devices} x {cluster.device.name} fits: "
        f"the smallest, {describe_layout(least)} ({describe_switches(least)}), needs "
        f"{format_bytes(held.total_bytes)} on stage {stage}, {format_bytes(limit)} of "
        f"{format_bytes(cluster.device.memory_bytes)} may be used: {format_bytes(missing)} are "
        f"missing. It holds {_told(held)}. {_advice(question, cluster)}"
    )


def _told(memory: RankMemory) -> str:
    sizes = {f.name: getattr(memory, f.name) for f in fields(memory)}
    named = sorted(sizes.items(), key=lambda item: -item[1])
    words = (
        f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(size)}"
        for name, size in named
        if size
    )
    return ", ".join(words)


def _advice(question: Question, cluster: Cluster) -> str:
    """What to change; recomputation, ZeRO and micro-batches were all searched."""
    enough = _enough_devices(question, cluster)
    choices = [f"use {enough} GPUs (the first doubling that fits)"] if enough else []
    most = question.limits.max_tensor
    if most < min(question.job.model.kv_heads, question.num_devices):
        choices.append(f"allow tensor parallelism above {most} (--max-tensor)")
    choices += ["shorten training.seq_len", "take a smaller model or devices with more memory"]
    return f"To change: {'; '.join(choices)}"


def _enough_devices(question: Question, cluster: Cluster) -> int | None:
    """The first doubling of the devices on which something fits, if the cluster has them."""
    limit = usable_bytes(cluster.device)
    per_node = question.devices_per_node
    num_devices = question.num_devices
    for _ in range(_DOUBLINGS):
        num_devices *= 2
        if num_devices > per_node:
            num_devices = -(-num_devices // per_node) * per_node
        if num_devices > question.most_devices:
            return None
        larger = replace(question, num_devices=num_devices)
        space = legal_layouts(
            larger.job,
            num_devices,
            limits=larger.limits,
            batch_sizes=larger.batch_sizes,
            transfers=larger.software.transfers,
        )
        if len(space) and most_bytes(larger, space).min() <= limit:
            return num_devices
    return None
