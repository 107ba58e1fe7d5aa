"""A plan as JSON: the twin of the text, with every number unrounded."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from megascale.plan.case import overrides_of
from megascale.plan.search.result import Plan, Ranked


def plan_document(plan: Plan) -> dict[str, Any]:
    """Seconds, bytes and fractions; keys carry their units."""
    return {
        "predicted": True,
        "cluster": plan.cluster,
        "device": plan.device,
        "num_devices": plan.num_devices,
        "devices_per_node": plan.devices_per_node,
        "memory_bytes": plan.memory_bytes,
        "limit_bytes": plan.limit_bytes,
        "search": {
            "num_legal": plan.num_legal,
            "num_fit": plan.num_fit,
            "num_simulated": plan.num_simulated,
            "seconds": plan.seconds,
        },
        "tokens_per_s": plan.tokens_per_s,
        "ranked": [ranked_document(one) for one in plan.ranked],
        "given": None if plan.given is None else ranked_document(plan.given),
        "given_problem": plan.given_problem or None,
        "why_the_runner_up_lost": list(plan.why),
        "confidence": asdict(plan.confidence),
        "assumptions": list(plan.assumptions),
        "sweeps": [asdict(sweep) for sweep in plan.sweeps],
        "training": None
        if plan.training is None
        else {**asdict(plan.training), "cost": plan.training.cost},
        "command": list(plan.command),
    }


def plan_json(plan: Plan) -> str:
    return json.dumps(plan_document(plan), indent=2, allow_nan=False)


def ranked_document(one: Ranked) -> dict[str, Any]:
    return {
        "place": one.place,
        "layout": asdict(one.layout),
        "set": overrides_of(one.layout),
        "step_s": one.step_s,
        "estimate_s": one.estimate_s,
        "by": "simulation" if one.simulated else "formula",
        "mfu": one.mfu,
        "mfu_causal": one.mfu_causal,
        "parts_s": dict(one.parts),
        "stage_bytes": list(one.stage_bytes),
    }
