"""Rows of `init` (form: `benchmarks/README.md`), and the paper's figures beside them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megascale.train.bench.rows import Origin
from megascale.train.bench_init.gloo import GlooResult
from megascale.train.bench_init.servers import check_redis_server
from megascale.train.bench_init.simulate import Measured, Rung

Row = dict[str, Any]
PAPER_RANKS, PAPER_MANY_RANKS = 2_048, 10_000
_PAPER_S = {("tcp", "poll"): 1047.0, ("redis", "poll"): 361.0, ("redis", None): 5.0}
_PAPER_MANY_S = 30.0  # "under 30 seconds", beyond 10,000 GPUs


def simulated_row(rung: Rung, num_ranks: int, found: Measured, origin: Origin) -> Row:
    paper_s = _paper_s(rung, num_ranks)
    passed_s = found.join_s + found.groups_s + found.ids_s
    extent = "all" if found.is_whole else f"scaled from the first {found.num_timed}"
    row = {
        **_row("simulated", rung, num_ranks, found.seconds),
        "groups": found.num_groups,
        "extent": extent,
        "calls": found.requests,
        "calls_per_s": found.requests / passed_s,
        "parts_s": {k: v for k, v in asdict(found).items() if k in ("join_s", "groups_s", "ids_s")},
        "cpu_s": {"server": found.server_cpu_s, "clients": found.clients_cpu_s},
        "baselines": {} if paper_s is None else {"paper": paper_s},
        **_here(origin),
    }
    if rung == Rung("redis", None) and paper_s is not None:
        row |= {"target": {"op": "<=", "value": paper_s}, "met": found.seconds <= paper_s}
    return row


def gloo_row(rung: Rung, num_ranks: int, found: GlooResult, origin: Origin, *, lazy: bool) -> Row:
    """The seconds are those of the groups, after all have joined the default one."""
    return {
        **_row("gloo-lazy" if lazy else "gloo", rung, num_ranks, found.groups_s),
        "groups": found.num_groups,
        "extent": "all",
        "world_s": found.world_s,
        "creation_s": found.creation_s,
        **_here(origin),
    }


def shape_rows(
    seconds: Mapping[tuple[Rung, int], float], num_ranks: int, origin: Origin
) -> list[Row]:
    """What each step of the ladder gains at this size, of rungs that were measured. At the paper's
    size each must gain something: how much depends on machines that are not the paper's."""
    steps = {
        "gain-redis": (Rung("tcp", "poll"), Rung("redis", "poll")),
        "gain-ordered": (Rung("redis", "poll"), Rung("redis", None)),
        "gain-both": (Rung("tcp", "poll"), Rung("redis", None)),
    }
    rows = []
    for line, (slow, fast) in steps.items():
        if not {(slow, num_ranks), (fast, num_ranks)} <= seconds.keys():
            continue
        value = seconds[slow, num_ranks] / seconds[fast, num_ranks]
        paper_s = [_PAPER_S[rung.store, rung.barrier] for rung in (slow, fast)]
        row = _row("simulated", slow, num_ranks, value)
        row["case"]["line"] = line
        row |= {"metric": "times", "baselines": {}, **_here(origin)}
        if num_ranks == PAPER_RANKS:
            row["baselines"] = {"paper": paper_s[0] / paper_s[1]}
            row |= {"target": {"op": ">=", "value": 1.0}, "met": value >= 1.0}
        rows.append(row)
    return rows


def _row(what: str, rung: Rung, num_ranks: int, value: float) -> Row:
    case = {
        "line": "creation",
        "what": what,
        "store": rung.store,
        "order": rung.order,
        "barrier": rung.barrier or "none",
        "ranks": num_ranks,
    }
    return {"bench": "init", "case": case, "metric": "s", "value": value}


def _paper_s(rung: Rung, num_ranks: int) -> float | None:
    if num_ranks == PAPER_RANKS:
        return _PAPER_S.get((rung.store, rung.barrier))
    many = num_ranks > PAPER_MANY_RANKS and rung == Rung("redis", None)
    return _PAPER_MANY_S if many else None


def _here(origin: Origin) -> Row:
    """Who measured: on a shared machine the load says what else ran."""
    row = origin.now()
    return {
        **row,
        "device": f"{row['device']}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
    }


def versions(stores: Sequence[str]) -> dict[str, str]:
    """Of redis-server, where it is measured."""
    if "redis" not in stores:
        return {}
    told = subprocess.run(
        [check_redis_server(), "--version"], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"v=(\S+)", told)
    return {"redis-server": found[1]} if found else {}
