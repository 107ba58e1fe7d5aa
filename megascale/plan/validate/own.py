"""Measured rows of this project (`benchmarks/results`) as cases on the cluster they ran on.

Rows of `step`, `ladder` and `bubble` count, the newest clean one of each case, as in the tables; of
older rows those that do not say their schedule and how weight gradients were joined are left out,
for their case is not known. `forms` says how each tensor-parallel operator ran: the most frequent
stands for the program's overlap.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.plan.case import Case, Job, Layout, Recompute, Software, TensorOverlap
from megascale.plan.machine.cluster import Cluster
from megascale.plan.validate.rows import Row

RESULTS = Path("benchmarks") / "results"
MODELS: dict[str, dict[str, Any]] = {
    "gpt3-175b-4l": {"preset": "bench-175b-4l"},
    "gpt3-175b-4l-128h": {"preset": "bench-175b-4l", "num_heads": 128},
    "gpt3-175b-8l": {"preset": "bench-175b-8l"},
    "7b": {"preset": "bench-7b"},
    "llama3-8b": {"preset": "llama3-8b"},
    "gpt3-1.3b": {"preset": "gpt3-1.3b"},
    "gpt3-2.7b": {"preset": "gpt3-2.7b"},
    "gpt3-6.7b-16l": {"preset": "gpt3-6.7b", "num_layers": 16},
    "gpt3-175b-2l": {"preset": "bench-175b-4l", "num_layers": 2},
    "llama3-8b-12l": {"preset": "llama3-8b", "num_layers": 12},
}
_JOINED = {"recipes/bench-7b.toml": "1"}  # weight gradients, by recipes that never said otherwise
_OVERLAP: dict[str, TensorOverlap] = {
    "nccl": "backward",
    "reference": "backward",
    "none": "none",
    "chunked": "chunked",
    "fused": "fused",
    "auto": "fused",
}
Found = dict[str, Any]


def read_own(folder: Path, cluster: Cluster) -> list[Row]:
    """The rows of `folder` on `cluster`; none where there is no such file."""
    rows: list[Row] = []
    for bench in ("step", "step-one-gpu", "ladder", "bubble"):
        rows += [row for found in _newest(folder, bench) if (row := own_row(found, cluster))]
    return rows


def _newest(folder: Path, bench: str) -> list[Found]:
    """The newest clean row of each case whose settings are told."""
    path = folder / f"{bench}.jsonl"
    if not path.exists():
        return []
    counted: dict[str, Found] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found = json.loads(line)
            settings = None if found["dirty"] or "step_s" not in found else settings_of(found)
            key = json.dumps({**found["case"], **(settings or {})}, sort_keys=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: not a result row: {error}") from None
        if settings and (key not in counted or found["time"] >= counted[key]["time"]):
            counted[key] = {**found, "settings": settings}
    return list(counted.values())


def settings_of(found: Found) -> Found | None:
    """Schedule, shared head and joined weight gradients: as told, else by the command's `--set`."""
    told = found.get("settings")
    if isinstance(told, dict):
        return told
    words = shlex.split(found.get("command", ""))
    given = dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "--set")
    usually = next((_JOINED[word] for word in words if word in _JOINED), None)
    joined = given.get("parallelism.join_weight_gradients", usually)
    if joined is None or "flux" not in found["case"]:  # of older rows the program is not known
        return None
    case = found["case"]
    usual = "interleaved_1f1b" if case["vp"] > 1 else "1f1b"
    return {
        "schedule": given.get("parallelism.pipeline_schedule", usual),
        "share_head": given.get("parallelism.share_head", "false") == "true",
        "join_weight_gradients": int(joined),
    }


def own_row(found: Found, cluster: Cluster) -> Row | None:
    """A result as a row; None where its model is not one of `MODELS`."""
    case = found["case"]
    if case["model"] not in MODELS:
        return None
    label = " ".join(
        f"{name} {case[name]}" for name in ("tp", "pp", "dp", "mbs", "gbs", "flux", "block")
    )
    return Row(
        "own",
        "megascale-py",
        case["model"],
        ", ".join([label, *_more(found)]),
        Case(_job(case), _layout(case, found["settings"]), _software(found)),
        cluster,
        float(found["step_s"]),
        f"benchmarks/results/{found['bench']}.jsonl, {found['time']}",
        memory_gb=found.get("peak_gb"),
    )


def _more(found: Found) -> list[str]:
    """What distinguishes rows beside the keys of a case."""
    case, settings = found["case"], found["settings"]
    joined = settings["join_weight_gradients"]
    return [
        *([case["rung"]] if "rung" in case else []),
        *([settings["schedule"]] if case["pp"] > 1 else []),
        *(["shared head"] if settings["share_head"] else []),
        *([f"weights of {joined} joined"] if joined > 1 else []),
    ]


def _job(case: Found) -> Job:
    window = case.get("window")
    if window is None and case["attention"] == "window":
        window = 768
    model = ModelConfig.model_validate(
        {**MODELS[case["model"]], "block": case["block"], "attention_window": window}
    )
    return Job(model, case["gbs"], case["seq"], case.get("optimizer", "adamw"))


def _layout(case: Found, settings: Found) -> Layout:
    schedule = settings["schedule"] if settings["schedule"] != "none" else "1f1b"
    return Layout(
        tensor=case["tp"],
        pipeline=case["pp"],
        virtual=case["vp"],
        data=case["dp"],
        micro_batch_size=case["mbs"],
        zero_stage=1,
        recompute=cast(Recompute, case["recompute"]),
        schedule=schedule,
        share_head=settings["share_head"],
        join_weight_gradients=settings["join_weight_gradients"],
    )


def _software(found: Found) -> Software:
    case = found["case"]
    forms = Counter((found.get("forms") or {}).values())
    form = forms.most_common(1)[0][0] if forms else case["flux"]
    overlapped = case.get("dp_overlap", "yes") != "no"
    return Software(
        tensor_overlap=_OVERLAP[form],
        transfers="coupled" if case.get("transfers") == "coupled" else "decoupled",
        overlap_grad_reduce=overlapped,
        overlap_param_gather=overlapped,
        operators=case.get("operators", "fused"),
        host_ahead=case.get("host", "ahead") == "ahead",
    )
