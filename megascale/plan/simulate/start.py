"""`megascale simulate`: a recipe's step on a cluster, or the paper's cases beside its figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megascale.config import RunConfig, load_config
from megascale.errors import ConfigError
from megascale.plan.case import case_of
from megascale.plan.machine.load import DEFAULT_CLUSTER, load_cluster
from megascale.plan.pricing import price
from megascale.plan.simulate.chrome import check_trace_path, write_trace
from megascale.plan.simulate.report import Replayed, Simulated, as_document, as_text, replay_text
from megascale.plan.simulate.step import simulate
from megascale.plan.validate.replay import PAPER, replay


def start_simulation(
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    cluster: str | None,
    gpus: int | None,
    paper: str | None,
    trace: Path | None,
    as_json: bool,
) -> str:
    """What the verb prints. Raises ConfigError before anything is simulated.

    cluster  None: DEFAULT_CLUSTER
    gpus     None: all of the cluster
    """
    if paper is not None:
        given = {
            "a recipe": recipe,
            "--set": overrides,
            "--cluster": cluster,
            "--gpus": gpus,
            "--trace": trace,
        }
        return _replay(paper, [word for word, value in given.items() if value], as_json=as_json)
    if recipe is None and not overrides:
        raise ConfigError(
            "nothing to simulate was given; name a recipe (see recipes/), or --paper with one of "
            f"{', '.join(PAPER)}"
        )
    if trace is not None:
        check_trace_path(trace)
    simulated = simulate_config(load_config(recipe, overrides), cluster or DEFAULT_CLUSTER, gpus)
    document = as_document(simulated)
    if trace is not None:
        write_trace(simulated.timeline, trace, document)
    if as_json:
        return json.dumps(document, indent=2)
    written = f"\n{trace}: open it in ui.perfetto.dev or chrome://tracing" if trace else ""
    return as_text(simulated) + written


def simulate_config(config: RunConfig, cluster: str, gpus: int | None) -> Simulated:
    """Raises ConfigError where the layout is illegal on so many devices, or the cluster unknown."""
    machine = load_cluster(cluster, gpus)
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not known; set it: --set model.vocab_size=64000, for example"
        )
    case = case_of(config, machine.num_devices)
    return Simulated(case, machine, simulate(case, price(case, machine)))


def _replay(name: str, given: Sequence[str], *, as_json: bool) -> str:
    if name not in PAPER:
        raise ConfigError(f"--paper is {name!r}; legal: {', '.join(PAPER)}")
    if given:
        raise ConfigError(
            f"--paper {name} was given with {', '.join(given)}; its cases are the paper's own: "
            "leave that out"
        )
    replayed = [
        Replayed(row, simulate(row.case, price(row.case, row.cluster, row.effects)))
        for row in replay(name)
    ]
    if as_json:
        rows = [one.as_document() for one in replayed]
        return json.dumps({"paper": name, "simulated": True, "rows": rows}, indent=2)
    return replay_text(name, replayed)
