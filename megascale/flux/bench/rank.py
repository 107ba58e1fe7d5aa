"""A rank of the bench: `python -m megascale.flux.bench.rank OPTIONS`, under torchrun's variables.

The order is the order of the cases; when the budget is spent the rest is named and not measured.
Eager cases come first (`cases.grid`) and leave a share of the budget to those in graphs.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megascale.env import rank_environment, switch_multicast_off
from megascale.errors import MegascaleError
from megascale.flux import torch_symm
from megascale.flux.arena import Arena
from megascale.flux.bench.cases import Case, Shape, grid
from megascale.flux.bench.measure import CaseError, Measured, Offer, measure
from megascale.flux.bench.memory import gathered_bytes, memory_lines
from megascale.flux.bench.rows import Origin, append, case_row, machine, newest, summary_row
from megascale.flux.bench.summary import Result, summarise
from megascale.flux.bench.work import Work
from megascale.flux.bench.world import World
from megascale.flux.default_rule import Mode
from megascale.flux.problem import Op
from megascale.flux.timing import Timer, slowest_rank
from megascale.flux.tuner import Tune, Tuner
from megascale.flux.tuning_cache import TuningCache

logger = logging.getLogger(__name__)

GRAPH_SHARE = 0.3  # of the budget, where both modes are measured
TUNING_ROUNDS = 3
WARM_UP_S = 2.0
INCOMPLETE = 20  # exit code: the run ended, and a case has no row


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    shapes: list[Shape]
    rows: list[int]
    ops: list[Op]
    modes: list[Mode]
    dtype: str
    output: str
    budget_s: float
    tune: Tune = "now"
    cache: str = ""
    commit: str = ""
    command: str = ""
    forms: list[str] = field(default_factory=list)  # of ours; none: all
    num_configs: int = 1_000  # of a form, at most

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Options:
        values = json.loads(text)
        return cls(**{**values, "shapes": [Shape(**shape) for shape in values["shapes"]]})

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class Bench:
    """The run of one rank."""

    def __init__(self, options: Options, world: World) -> None:
        self._options = options
        self._world = world
        self._origin = Origin(world, options.commit or None, options.command)
        self._cache = TuningCache.load(options.cache) if options.cache else TuningCache()
        self._offer = Offer(tuple(options.forms), options.num_configs)
        self._start = time.monotonic()
        self._failed: list[str] = []

    def run(self) -> bool:
        """Measure what the budget allows; whether every case that was begun has its row."""
        cases = grid(
            self._options.shapes,
            self._options.rows,
            self._options.ops,
            self._world.size,
            self._options.modes,
        )
        self._reserve(cases)
        self._warm_up()
        for mode in dict.fromkeys(case.mode for case in cases):
            self._phase(mode, [case for case in cases if case.mode == mode], cases[-1].mode)
        largest_bytes = self._largest_bytes(cases)
        memory = memory_lines(self._world, largest_bytes, self._options.torch_dtype)
        if self._world.rank == 0:
            path = Path(self._options.output)
            newest_rows = newest(path, self._origin, self._world.size)
            for found in [*summarise(newest_rows), *memory]:
                self._summary(found, path.with_name(f"{path.stem}-summary.jsonl"))
        return not self._failed

    def _phase(self, mode: Mode, cases: Sequence[Case], last_mode: Mode) -> None:
        budget_s = self._options.budget_s
        if mode != last_mode:
            budget_s *= 1 - GRAPH_SHARE
        timer = self._world.timer(mode)
        tuner = Tuner(
            self._cache,
            self._world.group,
            timer,
            tune=self._options.tune,
            num_rounds=TUNING_ROUNDS,
            arena=self._world.arena if isinstance(self._world.arena, Arena) else None,
        )
        for number, case in enumerate(cases):
            spent_s = slowest_rank({"s": time.monotonic() - self._start}, self._world.group)["s"]
            if spent_s > budget_s:
                rest = ", ".join(str(c) for c in cases[number:])
                self._say(f"{spent_s:.0f} s are spent of {budget_s:.0f}; not measured: {rest}")
                return
            self._case(case, tuner, timer)

    def _case(self, case: Case, tuner: Tuner, timer: Timer) -> None:
        start = time.monotonic()
        before = machine(self._world.device) if self._world.on_cuda else {}
        dtype = self._options.torch_dtype
        try:
            work = Work(case, self._world, dtype)
            found = measure(work, self._world, tuner, timer, self._offer)
        except CaseError as error:
            self._failed.append(str(case))
            self._say(f"{case}: no row: {error}")
            return
        row = case_row(case, found, self._world, self._origin, dtype)
        if before:
            row["machine"] = {**machine(self._world.device), "before": before}
        if self._world.rank == 0:
            append(Path(self._options.output), row)
        self._say(_line(case, found, row["met"], time.monotonic() - start))

    def _reserve(self, cases: Sequence[Case]) -> None:
        """Symmetric memory for the largest call, so that it does not grow between timings."""
        arena = self._world.arena
        if isinstance(arena, Arena):
            arena.reserve(self._largest_bytes(cases))
            torch_symm.reserve(arena, self._largest_bytes(cases))

    def _largest_bytes(self, cases: Sequence[Case]) -> int:
        return max(gathered_bytes(case, self._options.torch_dtype) for case in cases)

    def _warm_up(self) -> None:
        """Until clocks settle."""
        if not self._world.on_cuda:
            return
        square = torch.randn(8192, 8192, device=self._world.device, dtype=self._options.torch_dtype)
        end = time.monotonic() + WARM_UP_S
        while time.monotonic() < end:
            for _ in range(20):
                square @ square
            torch.cuda.synchronize()

    def _summary(self, found: Result, path: Path) -> None:
        row = summary_row(found, self._origin, self._world.size)
        append(path, row)
        met = {None: "", True: "met", False: "MISSED"}[row["met"]]
        target = f"{row['target']['op']} {row['target']['value']:.4g}" if row["target"] else ""
        self._say(
            f"{found.line.name} ({found.line.mode}, {found.num_cases} cases): "
            f"{found.value:.4g} {found.line.quantity.metric} {target} {met}".rstrip()
        )

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            print(text, flush=True)


def _line(case: Case, found: Measured, met: bool | None, took_s: float) -> str:
    times = {"gemm": found.gemm_ms, **found.forms}
    if found.own_gemm_ms is not None:
        times["own_gemm"] = found.own_gemm_ms
    listed = " ".join(f"{name} {ms:.4f}" for name, ms in times.items())
    hidden = "" if found.efficiency is None else f" hides {found.efficiency:.2f}"
    host = "" if found.host_us is None else f" host {found.host_us:.0f} us"
    judged = {None: "", True: " met", False: " MISSED"}[met]
    return (
        f"{case}: {listed} | {found.chosen.label}{hidden} noise {found.noise:.1%}{host}{judged} "
        f"({found.num_rounds} rounds, {took_s:.1f} s)"
    )


def main() -> None:
    """One rank, from joining to its end."""
    options = Options.parse(sys.argv[1])
    place = rank_environment()
    switch_multicast_off()
    logging.basicConfig(format=f"[rank {place.global_rank}] %(message)s")
    try:
        world = World.join(place)
        complete = Bench(options, world).run()
        world.quiesce()
        dist.destroy_process_group()
    except MegascaleError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    sys.exit(0 if complete else INCOMPLETE)


if __name__ == "__main__":
    main()
