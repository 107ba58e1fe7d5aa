"""`parallelism.layout = "auto"`: a run's layout, chosen once, by whoever starts the ranks.

On GPUs by the planner: the fastest layout that fits on the named cluster, or on that of the
catalogue whose device has the same name. On a CPU, where nothing is priced and memory is shared, by
a rule: the fewest ranks a replica that the batch allows, that is as much data parallelism as it
divides; of those the least tensor parallelism; the recipe's micro-batch if it is legal, else the
nearest smaller; the recipe's recomputation; plain 1F1B.

A choice is a pure function of configuration, number of ranks and cluster. It is stored as the keys
that it stands for (`Choice.overrides`), so that a resumed run keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megascale.config import RunConfig, with_overrides
from megascale.errors import ConfigError
from megascale.plan.case import Layout, case_of, overrides_of
from megascale.plan.machine.load import CATALOGUE, load_cluster
from megascale.plan.report.document import ranked_document
from megascale.plan.report.text import seconds
from megascale.plan.search.explain import describe_layout, describe_switches
from megascale.plan.search.find import find, judge, legal_space
from megascale.plan.search.question import question_of
from megascale.plan.search.result import Ranked
from megascale.plan.search.scale import USUAL
from megascale.plan.search.space import Limits
from megascale.units import format_bytes, peak_tflops


@dataclass(frozen=True)
class Choice:
    """A layout for a run.

    cluster    that it was planned for; empty: by the rule for CPUs
    ranked     its predicted step; None: nothing was priced
    num_legal  layouts that it was chosen from
    """

    layout: Layout
    num_ranks: int
    cluster: str
    ranked: Ranked | None
    num_legal: int

    @property
    def overrides(self) -> list[str]:
        return run_overrides(self.layout)

    def __str__(self) -> str:
        head = (
            f"layout chosen from {self.num_legal:,}: {describe_layout(self.layout)} "
            f"({describe_switches(self.layout)})"
        )
        if self.ranked is None:
            return f"{head}; on a CPU by rule, as much data parallelism as the batch divides"
        return f"{head}; {predicted(self.ranked, self.cluster)}"

    def document(self) -> dict[str, Any]:
        """For the run's folder."""
        return {
            "num_ranks": self.num_ranks,
            "chosen_from": self.num_legal,
            "cluster": self.cluster or None,
            "layout": asdict(self.layout),
            "set": self.overrides,
            "predicted": None if self.ranked is None else ranked_document(self.ranked),
        }


@dataclass(frozen=True)
class Resolved:
    """What a start does with `layout = "auto"`.

    config     with the layout in it
    overrides  that make it, for ranks that are started with `--set`
    told       one line for the log
    choice     None: the run's stored layout is kept
    """

    config: RunConfig
    overrides: list[str]
    told: str
    choice: Choice | None


def resolve_layout(
    config: RunConfig,
    num_ranks: int,
    device: Callable[[], str | None],
    *,
    stored: RunConfig | None = None,
) -> Resolved:
    """The layout of a start. ConfigError where there is none, or no cluster is known.

    device  name of the ranks' GPUs; None: they run on CPUs. Asked where no cluster is named
    stored  of the run that is resumed: its layout is kept where it fits these ranks
    """
    lost = ""
    if stored is not None:
        try:
            layout = case_of(stored, num_ranks).layout
            overrides = run_overrides(layout)
            kept = with_overrides(config, overrides)
            kept.mesh(num_ranks)
            told = f"layout kept from the run's start: {describe_layout(layout)}"
            return Resolved(kept, overrides, f"{told} ({describe_switches(layout)})", None)
        except ConfigError as error:
            lost = f"the run's stored layout does not fit {num_ranks} ranks ({error}); "
    choice = choose_layout(config, num_ranks, device)
    resolved = with_overrides(config, choice.overrides)
    return Resolved(resolved, choice.overrides, f"{lost}{choice}", choice)


def run_overrides(layout: Layout) -> list[str]:
    """What gives a run this layout. The data degree follows from the ranks, so that a resumed run
    may have more or fewer replicas."""
    keys = [key for key in overrides_of(layout) if "data_parallel_size" not in key]
    return ["parallelism.layout=given", "parallelism.data_parallel_size=-1", *keys]


def predicted(ranked: Ranked, cluster: str) -> str:
    """One line: "predicted for cluster 'h200': 1.234 s a step, MFU 41.2%, 60.10GiB on stage 0"."""
    return (
        f"predicted for cluster {cluster!r}: {seconds(ranked.step_s)} a step, MFU "
        f"{ranked.mfu:.1%}, {format_bytes(ranked.most_bytes)} on stage {ranked.fullest_stage}"
    )


def choose_layout(config: RunConfig, num_ranks: int, device: Callable[[], str | None]) -> Choice:
    """The layout of a run of `num_ranks`. ConfigError where there is none, or no cluster is known.

    device  name of the ranks' GPUs; None: they run on CPUs. Asked where no cluster is named
    """
    name = config.parallelism.cluster
    if not name:
        found = device()
        if found is None:
            return _by_rule(config, num_ranks)
        name = cluster_of(found)
    whole, cluster = load_cluster(name), load_cluster(name, num_ranks)
    question = question_of(
        config,
        num_ranks,
        devices_per_node=whole.devices_per_node,
        most_devices=whole.limit,
    )
    answer = find(question, cluster, scale=USUAL, top=1)
    best = answer.ranked[0]
    return Choice(best.layout, num_ranks, name, best, answer.num_legal)


def predict(config: RunConfig, num_ranks: int, name: str) -> Ranked:
    """The step of a configuration's own layout on a cluster, and its memory."""
    whole, cluster = load_cluster(name), load_cluster(name, num_ranks)
    question = question_of(
        config,
        num_ranks,
        devices_per_node=whole.devices_per_node,
        most_devices=whole.limit,
    )
    if question.given is None:
        raise ConfigError(question.given_problem)
    return judge(question, cluster, question.given, USUAL)


def cluster_of(device_name: str) -> str:
    """The cluster of the catalogue with this device. ConfigError where there is none."""
    row = peak_tflops(device_name)
    for name in CATALOGUE:
        theirs = peak_tflops(load_cluster(name).device.name)
        if row is not None and theirs is not None and row[1] == theirs[1]:
            return name
    raise ConfigError(
        f"parallelism.layout is 'auto', and no cluster of the catalogue ({', '.join(CATALOGUE)}) "
        f"has the device {device_name!r}; measure this one with `megascale calibrate FILE` and set "
        "parallelism.cluster to the file"
    )


def _by_rule(config: RunConfig, num_ranks: int) -> Choice:
    """See the module."""
    limits = Limits(
        max_tensor=num_ranks,
        zero_stages=(1,),
        recomputes=(config.activation_checkpoint.mode,),
        joins=(1,),
        share_heads=(False,),
    )
    question = question_of(
        config, num_ranks, devices_per_node=num_ranks, most_devices=num_ranks, limits=limits
    )
    space = legal_space(question)
    size, wanted = space.micro_batch_size, config.training.micro_batch_size
    # the last key decides first
    order = np.lexsort(
        (
            np.abs(size - wanted),
            size > wanted,
            space.schedule,
            space.virtual,
            space.tensor,
            space.tensor * space.pipeline,
        )
    )
    return Choice(space.layout(int(order[0])), num_ranks, "", None, len(space))
