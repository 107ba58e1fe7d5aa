"""Rows of `step` and `peers` from the runs of one case (form: `benchmarks/README.md`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.cases import OURS, PEERS, Peer, Setup
from benchmarks.peers.options import llama_block
from benchmarks.peers.result import Result, timed
from benchmarks.peers.turns import Found
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run
from megascale.train.bench.rows import Origin, Row, measured, step_row
from megascale.units import flops_per_token, mfu, peak_tflops

SHARED_KEYS = ("model", "tp", "pp", "vp", "dp", "mbs", "gbs", "seq")


@dataclass(frozen=True)
class Stamped(Origin):
    """An origin whose time has come: all rows of a case share one."""

    stamp: Row

    def now(self) -> Row:
        return dict(self.stamp)


def stamped(origin: Origin) -> Stamped:
    """Device, clocks and time of now."""
    return Stamped(origin.fields, origin.on_gpus, origin.now())


def rows_of(
    setup: Setup,
    case: Case,
    made: Found,
    origin: Origin,
) -> tuple[Row | None, list[Row]]:
    """(row of `step`, None where megascale has no run; rows of `peers`, one a system)."""
    now = stamped(origin)
    ours = made.ours
    found = {
        name: peer_row(
            case,
            PEERS[name],
            name,
            results,
            now.stamp,
            num_discarded=made.discarded.get(name, 0),
        )
        for name, results in made.peers.items()
        if results
    }
    rows = list(found.values())
    if not ours:
        return None, rows
    baselines = {
        PEERS[name].baseline: row["value"]
        for name, row in found.items()
        if row["value"] is not None
    }
    target = setup.target
    if setup.over_better is not None and baselines:
        target = setup.over_better * max(baselines.values())
    step = step_row(case, ours, now, target=target, baselines=baselines)
    return step, [_our_row(case, ours, now.stamp), *rows]


def peer_row(
    case: Case,
    peer: Peer,
    name: str,
    results: Sequence[Result],
    stamp: Mapping[str, Any],
    *,
    num_discarded: int = 0,
) -> Row:
    """Of a peer: the median over its runs of each run's median step.

    num_discarded  runs that are not among `results`, because a later one needed more recomputation
    """
    training = case.config.training
    step_s = statistics.median(result.median_s for result in results)
    tokens_per_s = training.global_batch_size * training.seq_len / step_s
    is_titan = results[0].system == "torchtitan"
    model = llama_block(case.config.model) if is_titan else case.config.model
    known = peak_tflops(str(stamp["device"]))

    def utilisation(causal: Any) -> float | None:
        if known is None:
            return None
        flops = flops_per_token(model, training.seq_len, causal)
        return mfu(tokens_per_s, flops, case.num_ranks, known[0])

    recomputed = results[-1].settings.get("recompute_layers")
    times = [seconds for result in results for seconds in timed(result.step_s)]
    return {
        "bench": "peers",
        "case": {
            **{key: case.keys[key] for key in SHARED_KEYS},
            "system": name,
            "recompute": f"{recomputed} layers" if recomputed else peer.recompute,
        },
        "metric": "mfu",
        "value": utilisation("full"),
        "mfu_causal": utilisation("half"),
        "step_s": step_s,
        "tokens_per_s_per_gpu": tokens_per_s / case.num_ranks,
        "peak_gb": max(result.peak_reserved_gb for result in results),
        "peak_allocated_gb": max(result.peak_allocated_gb for result in results),
        "stats": {
            "runs": len(results),
            "rounds": len(times),
            "min": min(times),
            "max": max(times),
            **({"discarded": num_discarded} if num_discarded else {}),
        },
        "losses": list(results[-1].losses),
        "settings": dict(results[-1].settings),
        "baselines": {},
        "met": None,
        **stamp,
        "versions": {**stamp["versions"], results[-1].system: results[-1].version},
    }


def _our_row(case: Case, runs: Sequence[Run], stamp: Mapping[str, Any]) -> Row:
    keys = {key: case.keys[key] for key in SHARED_KEYS}
    return {
        "bench": "peers",
        "case": {**keys, "system": OURS, "recompute": case.keys["recompute"]},
        **measured(runs),
        "losses": runs[-1].losses,
        "settings": {
            **{key: case.keys[key] for key in ("block", "attention", "flux")},
            **case.settings,
        },
        "baselines": {},
        "met": None,
        **stamp,
    }
