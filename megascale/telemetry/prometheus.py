"""A node's endpoint for Prometheus: what its own ranks do, asked by scraping.

A process beside the ranks, which the first of them starts (`telemetry.prometheus_port`), so that it
answers also while they hang, and costs them nothing. It reads what is new in their line files when
it is scraped and at no other time. It listens on loopback; it ends with the process that began it.

Its series are bounded: a node's own ranks times the names below, phases and incidents at most
MOST_NAMES. What the whole job reports (loss, MFU) comes from the node of rank 0 alone, so that sums
over nodes count it once.

    curl http://127.0.0.1:PORT/metrics
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.env import child_environment
from megascale.errors import DataError, require_extra
from megascale.events import Dropped, Event, Header, Incident, Ongoing, Step, Sums, parse_line
from megascale.telemetry.tail import Tail
from megascale.telemetry.writer import line_file

ADDRESS = "127.0.0.1"
MOST_NAMES = 64
_BIND_FOR_S = 10.0  # the endpoint of a start before may still be ending
_BIND_INTERVAL_S = 0.5
_PARENT_INTERVAL_S = 1.0
_log = logging.getLogger(__name__)

JOB = {  # field of metrics.jsonl -> (name, what it is)
    "loss": ("megascale_loss", "mean loss over the tokens of the newest logged step"),
    "grad_norm": ("megascale_grad_norm", "global gradient norm"),
    "lr": ("megascale_learning_rate", "learning rate"),
    "tokens_per_s": ("megascale_tokens_per_second", "tokens a second, all devices together"),
    "mfu": ("megascale_mfu_ratio", "model FLOPs utilisation, causal attention in full"),
    "skipped_steps": ("megascale_skipped_steps", "steps skipped so far for a bad gradient"),
}
RANK = {
    "step": ("megascale_step", "the last step that the rank has finished"),
    "step_s": ("megascale_step_seconds", "how long that step took"),
    "age_s": ("megascale_progress_age_seconds", "since the rank finished a step, or began"),
    "waiting_s": ("megascale_waiting_seconds", "in a collective beyond its deadline; 0: it is not"),
}


@dataclass
class _Rank:
    """The newest that a rank said."""

    moved_ns: int | None = None
    step: int | None = None
    step_s: float | None = None
    phase_s: dict[str, float] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    incidents: Counter[str] = field(default_factory=Counter)
    waiting_since_ns: int | None = None

    def see(self, event: Event) -> None:
        if isinstance(event, Header):
            self.moved_ns, self.waiting_since_ns = event.monotonic_ns, None
        elif isinstance(event, Step):
            self.step, self.step_s = event.step, event.dur_ns / 1e9
            self.moved_ns = max(event.t0_ns + event.dur_ns, event.issued_ns or 0)
            self.waiting_since_ns = None
        elif isinstance(event, Sums):
            some = list(event.sums.items())[:MOST_NAMES]
            self.phase_s = {name: total["total_ns"] / 1e9 for name, total in some}
        elif isinstance(event, Dropped):
            self.dropped[event.where] = event.count
        elif isinstance(event, Ongoing):
            self.waiting_since_ns = event.t_ns - event.waited_ns
        elif isinstance(event, Incident):
            known = event.name in self.incidents or len(self.incidents) < MOST_NAMES
            self.incidents[event.name if known else "other"] += 1


class NodeMetrics:
    """A collector of `prometheus_client`: reads what is new, and gives it."""

    def __init__(self, run_dir: Path, ranks: Sequence[int]) -> None:
        self._ranks = {rank: _Rank() for rank in ranks}
        self._tails = {rank: Tail(line_file(run_dir, rank)) for rank in ranks}
        self._job = Tail(run_dir / "metrics.jsonl") if 0 in self._ranks else None
        self._job_values: dict[str, Any] = {}

    def refresh(self) -> None:
        for rank, tail in self._tails.items():
            for line in tail.lines():
                with suppress(DataError):  # of another version: the store counts these
                    self._ranks[rank].see(parse_line(line))
        for line in self._job.lines() if self._job is not None else ():
            with suppress(ValueError):
                self._job_values = json.loads(line)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self.refresh()
        now_ns = time.monotonic_ns()
        for key, (name, what) in RANK.items():
            family = GaugeMetricFamily(name, what, labels=["rank"])
            for rank, seen in self._ranks.items():
                value = _value(seen, key, now_ns)
                if value is not None:
                    family.add_metric([str(rank)], value)
            yield family
        phases = GaugeMetricFamily(
            "megascale_phase_seconds", "time by phase in that step", labels=["rank", "phase"]
        )
        dropped = CounterMetricFamily(
            "megascale_dropped_events", "events that were lost", labels=["rank", "where"]
        )
        incidents = CounterMetricFamily(
            "megascale_incidents", "incidents since the endpoint began", labels=["rank", "name"]
        )
        for rank, seen in self._ranks.items():
            named = ((phases, seen.phase_s), (dropped, seen.dropped), (incidents, seen.incidents))
            for of, values in named:
                for name, value in values.items():
                    of.add_metric([str(rank), name], value)
        yield from (phases, dropped, incidents)
        for key, (name, what) in JOB.items():
            if isinstance(self._job_values.get(key), int | float):
                yield GaugeMetricFamily(name, what, value=self._job_values[key])


def _value(seen: _Rank, key: str, now_ns: int) -> float | None:
    if key == "age_s":
        return None if seen.moved_ns is None else max(0, now_ns - seen.moved_ns) / 1e9
    if key == "waiting_s":
        since_ns = seen.waiting_since_ns
        return 0.0 if since_ns is None else (now_ns - since_ns) / 1e9
    value: float | None = getattr(seen, key)
    return value


# ---------------------------------------------------------------- the process


def start_endpoint(run_dir: Path, ranks: range, port: int) -> subprocess.Popen[bytes]:
    """The endpoint of a node, as a child that ends with this process."""
    command = [sys.executable, "-m", "megascale.telemetry.prometheus", str(run_dir)]
    command += [str(ranks.start), str(ranks.stop), str(port), str(os.getpid())]
    return subprocess.Popen(command, env=child_environment({}), stdin=subprocess.DEVNULL)


def serve(metrics: NodeMetrics, port: int, *, bind_for_s: float = _BIND_FOR_S) -> Any:
    """(server, thread) on loopback; None where the port stays in use, which is logged."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        _log.warning("%s", require_extra("prometheus-client", "telemetry"))
        return None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    give_up_s = time.monotonic() + bind_for_s
    while True:
        try:
            return start_http_server(port, addr=ADDRESS, registry=registry)
        except OSError as error:
            if time.monotonic() >= give_up_s:
                _log.warning(
                    "telemetry.prometheus_port %d on %s cannot be used (%s): this node exports no "
                    "metrics, the run goes on; choose a free port, or 0 for none",
                    port,
                    ADDRESS,
                    error.strerror or error,
                )
                return None
            time.sleep(_BIND_INTERVAL_S)


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m megascale.telemetry.prometheus")
    parser.add_argument("run_dir", type=Path)
    for name in ("first", "stop", "port", "parent"):
        parser.add_argument(name, type=int)
    given = parser.parse_args(arguments)
    served = serve(NodeMetrics(given.run_dir, range(given.first, given.stop)), given.port)
    while served is not None and os.getppid() == given.parent:
        time.sleep(_PARENT_INTERVAL_S)


if __name__ == "__main__":
    main()
