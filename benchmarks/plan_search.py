"""How long a full search takes: every legal layout, those that fit, the best ones simulated.

    python -m benchmarks.plan_search [--rounds N] [--output FILE]

Each round is a process of its own, so that nothing is remembered from the one before; the time is
that of the search alone (`Found.seconds`), without the interpreter's start. Before it counts, the
formula of many layouts at once is held against the formula of one for a sample of them, and the
best layout is loaded as the trainer would load it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import writable_file
from megascale.config import load_config, with_overrides
from megascale.env import installed_versions
from megascale.plan.case import overrides_of
from megascale.plan.estimate import estimate
from megascale.plan.machine.load import load_cluster
from megascale.plan.pricing import price
from megascale.plan.search.find import Found, find, formula_seconds, legal_space
from megascale.plan.search.question import Question, question_of
from megascale.plan.search.scale import USUAL
from megascale.train.run_folder import commit

RESULTS = Path("benchmarks/results/plan.jsonl")
TARGET_GPUS, TARGET_S, LEAST_LAYOUTS = 12_288, 5.0, 20_000
RECIPES = {
    "megascale-175b": ("recipes/gpt3-175b.toml", ("training.global_batch_size=6144",), 12_288),
    "megascale-530b": (
        "recipes/megascale-530b.toml",
        ("training.global_batch_size=11200",),
        11_200,
    ),
}
CASES = (("megascale-175b", "paper"), ("megascale-175b", "h200"), ("megascale-530b", "paper"))
SAMPLE, TOLERANCE = 50, 1e-9


def main() -> None:
    """Print the times; append a row a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    parser.add_argument("--once", nargs=2, metavar=("MODEL", "CLUSTER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(_once(*arguments.once)))
        return
    origin = _origin()  # before a row makes the tree another one
    for model, cluster in CASES:
        rounds = [_in_a_process(model, cluster) for _ in range(arguments.rounds)]
        row = make_row(model, cluster, rounds, origin)
        with arguments.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{model} on {row['case']['gpus']} of {cluster}: {row['value']:.2f} s for "
            f"{row['num_legal']:,} layouts, {row['num_fit']:,} fit; met: {row['met']}"
        )


def make_row(
    model: str, cluster: str, rounds: list[dict[str, Any]], origin: dict[str, Any]
) -> dict[str, Any]:
    """As `benchmarks/README.md` describes it; the median of the rounds."""
    seconds = [one["seconds"] for one in rounds]
    value = statistics.median(seconds)
    found = {key: rounds[0][key] for key in ("num_legal", "num_fit", "num_simulated", "best")}
    assert all(one["best"] == found["best"] for one in rounds), "a search has one answer"
    has_target = RECIPES[model][2] == TARGET_GPUS
    target = {"op": "<=", "value": TARGET_S, "least_layouts": LEAST_LAYOUTS}
    met = value <= TARGET_S and found["num_legal"] >= LEAST_LAYOUTS
    return {
        "bench": "plan",
        "case": {
            "set": "search",
            "system": "megascale-py",
            "gpus": RECIPES[model][2],
            "model": model,
            "extra": cluster,
        },
        "metric": "s",
        "value": round(value, 3),
        "baselines": {},
        "target": target if has_target else None,
        "met": met if has_target else None,
        **found,
        "stats": {"rounds": len(rounds), "min": min(seconds), "max": max(seconds)},
        "device": f"cpu, {os.cpu_count()} cores",
        "num_devices": 0,
        **origin,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", "benchmarks.plan_search", *sys.argv[1:]]),
    }


def _origin() -> dict[str, Any]:
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    status = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "commit": commit(),
        "dirty": bool(status.stdout.strip()),
        "versions": {"python": sys.version.split()[0], **installed_versions(("numpy",))},
    }


def _in_a_process(model: str, cluster: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.plan_search", "--once", model, cluster]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _once(model: str, cluster_name: str) -> dict[str, Any]:
    recipe, overrides, gpus = RECIPES[model]
    config = load_config(recipe, overrides)
    cluster = load_cluster(cluster_name, gpus)
    question = question_of(
        config, gpus, devices_per_node=cluster.devices_per_node, most_devices=cluster.limit
    )
    found = find(question, cluster, scale=USUAL)
    best = found.ranked[0].layout
    with_overrides(config, overrides_of(best)).mesh(gpus)
    _check_formula(question, cluster_name, found)
    return {
        "seconds": found.seconds,
        "num_legal": found.num_legal,
        "num_fit": found.num_fit,
        "num_simulated": found.num_simulated,
        "best": overrides_of(best),
    }


def _check_formula(question: Question, cluster_name: str, found: Found) -> None:
    """The formula of many and of one give the same."""
    cluster = load_cluster(cluster_name, question.num_devices)
    space = legal_space(question)
    assert len(space) == found.num_legal
    places = np.random.default_rng(0).choice(len(space), SAMPLE, replace=False)
    sample = space.take(places)
    many = formula_seconds(question, sample, cluster)
    for place, layout in enumerate(sample.layouts()):
        case = question.case(layout)
        one = estimate(case, price(case, cluster), cluster.device.peak_tflops).step_s
        assert abs(many[place] / one - 1.0) < TOLERANCE, (layout, many[place], one)


if __name__ == "__main__":
    main()
