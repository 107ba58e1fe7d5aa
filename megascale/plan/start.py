"""`megascale plan`: check everything, search, explain, and say it as text, JSON or a page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megascale.config import RunConfig, load_config
from megascale.errors import ConfigError
from megascale.plan.case import Layout, overrides_of
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import DEFAULT_CLUSTER, load_cluster
from megascale.plan.machine.usable import usable_bytes
from megascale.plan.report.document import plan_json
from megascale.plan.report.page import check_report, write_page
from megascale.plan.report.text import plan_text
from megascale.plan.search.assumptions import assumptions_of
from megascale.plan.search.confidence import confidence_of
from megascale.plan.search.explain import why_slower
from megascale.plan.search.find import Found, find
from megascale.plan.search.question import Question, question_of
from megascale.plan.search.result import Plan
from megascale.plan.search.scale import USUAL, Scale
from megascale.plan.search.space import Limits
from megascale.plan.search.training_cost import check_tokens, training_cost


def start_plan(
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    cluster: str | None = None,
    gpus: int | None = None,
    top: int = 5,
    tokens: float | None = None,
    price: float | None = None,
    max_tensor: int | None = None,
    scale: Scale = USUAL,
    report: Path | None = None,
    as_json: bool = False,
) -> str:
    """What the verb prints. ConfigError before anything is searched where something is not legal.

    cluster     a name of the catalogue, or a file; None: the recipe's parallelism.cluster, else the
                usual one
    gpus        default: all of the cluster
    tokens      to train on; `price`: of a GPU-hour
    max_tensor  default: the devices of a node
    scale       which of its effects are counted
    """
    if recipe is None and not overrides:
        raise ConfigError(
            "nothing to plan was given; name a recipe (see recipes/), or a model: "
            "--set model.preset=megascale-175b --set training.global_batch_size=6144"
        )
    check_tokens(tokens)
    _check_price(price, tokens)
    check_report(report)
    config = load_config(recipe, overrides)
    plan = plan_config(
        config,
        cluster or config.parallelism.cluster or DEFAULT_CLUSTER,
        gpus,
        top=top,
        max_tensor=max_tensor,
        scale=scale,
        recipe=str(recipe or "RECIPE"),
        overrides=overrides,
    )
    if tokens is not None:
        plan = with_tokens(plan, tokens, price)
    if report is not None:
        write_page(plan, report)
    if as_json:
        return plan_json(plan)
    return plan_text(plan) + (f"\nwritten: {report}" if report is not None else "")


def plan_config(
    config: RunConfig,
    cluster_name: str,
    gpus: int | None,
    *,
    top: int = 5,
    max_tensor: int | None = None,
    scale: Scale = USUAL,
    recipe: str = "RECIPE",
    overrides: Sequence[str] = (),
) -> Plan:
    """The plan of a configuration, without tokens.

    recipe, overrides  that the configuration was made of, for the command that starts the run
    """
    whole = load_cluster(cluster_name)
    cluster = load_cluster(cluster_name, gpus)
    question = question_of(
        config,
        cluster.num_devices,
        devices_per_node=whole.devices_per_node,
        most_devices=whole.limit,
        limits=Limits(max_tensor=max_tensor or whole.devices_per_node),
    )
    found = find(question, cluster, scale=scale, top=top)
    command = _command(recipe, overrides, cluster, found.ranked[0].layout)
    return _plan(question, cluster, found, command, scale)


def with_tokens(plan: Plan, tokens: float, price: float | None) -> Plan:
    """The same, with a training of so many tokens."""
    training = training_cost(tokens, plan.tokens_per_s, plan.num_devices, price)
    return replace(plan, training=training)


def _plan(
    question: Question, cluster: Cluster, found: Found, command: tuple[str, ...], scale: Scale
) -> Plan:
    best, *others = found.ranked
    return Plan(
        job=question.job,
        cluster=cluster.name,
        device=cluster.device.name,
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        limit_bytes=usable_bytes(cluster.device),
        memory_bytes=cluster.device.memory_bytes,
        num_legal=found.num_legal,
        num_fit=found.num_fit,
        num_simulated=found.num_simulated,
        seconds=found.seconds,
        ranked=found.ranked,
        given=found.given,
        given_problem=found.given_problem,
        why=why_slower(best, others[0]) if others else (),
        confidence=confidence_of(cluster),
        assumptions=assumptions_of(question, cluster, best.layout, scale),
        sweeps=found.sweeps,
        training=None,
        command=command,
    )


def _command(
    recipe: str, overrides: Sequence[str], cluster: Cluster, layout: Layout
) -> tuple[str, ...]:
    """Lines that start the run with this layout; what comes last wins."""
    if cluster.num_devices <= cluster.devices_per_node:
        start = f"megascale train {shlex.quote(recipe)} --nproc {cluster.num_devices}"
    else:
        start = (
            f"megascale run {shlex.quote(recipe)} --nodes {cluster.num_nodes} "
            f"--procs-per-node {cluster.devices_per_node}"
        )
    chosen = ["parallelism.layout=given", *overrides_of(layout)]
    return (start, *(f"--set {shlex.quote(word)}" for word in [*overrides, *chosen]))


def _check_price(price: float | None, tokens: float | None) -> None:
    if price is None:
        return
    if not (math.isfinite(price) and price >= 0.0):
        raise ConfigError(f"--price-per-gpu-hour {price:g}: a price is a number, 0 or more")
    if tokens is None:
        raise ConfigError(
            "--price-per-gpu-hour was given without --tokens; say how many tokens are paid for, "
            "such as --tokens 300e9"
        )
