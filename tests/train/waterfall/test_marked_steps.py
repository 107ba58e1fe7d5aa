"""Marked steps on gloo ranks: values are the same, time adds up, a delay is found in its class."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.config import load_config
from megascale.events import Span, Step
from megascale.model.context import make_context
from megascale.telemetry.recorder import NullRecorder
from megascale.train.assemble import assemble
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run
from megascale.train.bench.records import record_of
from megascale.train.bench.waterfall import Classes, waterfalls
from megascale.train.waterfall.probe import Probe, attach
from tests.distributed import run_ranks
from tests.train.waterfall.measured import SMALL, Measured, run_marked

LAYOUTS = {
    "single": (1, []),
    "tp2": (2, ["parallelism.tensor_parallel_size=2"]),
    "pp2": (2, ["parallelism.pipeline_parallel_size=2"]),
    "dp2": (2, []),
    "shared": (
        2,
        [
            *("parallelism.pipeline_parallel_size=2", "parallelism.virtual_pipeline_size=2"),
            *("parallelism.share_head=true", "parallelism.pipeline_schedule=interleaved_zb"),
        ],
    ),
}
NUM_STEPS = 5


def _run(
    layout: str,
    *settings: str,
    delayed: str | None = None,
    seconds: float = 0.0,
    marks: bool = True,
    quiet: bool = False,
) -> list[Measured]:
    world_size, own = LAYOUTS[layout]
    arguments = ([*own, *settings], delayed, seconds, NUM_STEPS, marks, quiet)
    found: list[Measured] = run_ranks(run_marked, world_size, *arguments, timeout_s=100)
    return found


def _waterfalls(layout: str, found: list[Measured], *settings: str) -> list[Classes]:
    """Of every rank: the mean of the steps but the first and the last."""
    world_size, own = LAYOUTS[layout]
    config = load_config(None, [*SMALL, *own, *settings])
    case = Case("small", Path("small"), (), config, world_size)
    steps: list[dict[str, Any]] = [{"step": n} for n in range(1, NUM_STEPS + 1)]
    run = Run(steps, [record_of(iter(one.events)) for one in found])
    assert [step["step"] for step in run.timed] == [4]
    object.__setattr__(run, "steps", [{"step": -1}, {"step": 0}, *steps])  # 2 to 4 are timed
    return waterfalls(run, case, peak_tflops=0.01)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_marks_change_no_value(block: str, recompute: str) -> None:
    settings = (f"model.block={block}", f"activation_checkpoint.mode={recompute}")
    marked, plain = (_run("single", *settings, marks=marks)[0] for marks in (True, False))
    assert marked.losses == pytest.approx(plain.losses, rel=1e-6), "sums in another order at most"
    names = Counter(s.name for s in marked.events if isinstance(s, Span) and s.step == 3)
    assert names["op_backward"] > 0
    assert not any(s.name.startswith("op_") for s in plain.events if isinstance(s, Span))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operator_is_marked_and_classes_are_the_step(layout: str) -> None:
    found = _run(layout)
    for one in found:
        spans = [s for s in one.events if isinstance(s, Span) and s.step == 3]
        counts = Counter((s.op, s.name) for s in spans if s.name.startswith("op_"))
        for key in ("attn.qkv", "attn.o", "mlp.fc1", "mlp.fc2", "attn.core", "norm1", "layer"):
            layers = 2 if layout in ("pp2", "shared") else 4
            micro_batches = 2 if layout == "dp2" else 4
            assert counts[key, "op_forward"] == layers * micro_batches, key
            assert counts[key, "op_backward"] == layers * micro_batches, key
    windows = []
    for one in found:
        begins = {e.step: e.t0_ns for e in one.events if isinstance(e, Step)}
        windows.append(statistics.fmean((begins[n + 1] - begins[n]) / 1e6 for n in (2, 3, 4)))
    for classes, window in zip(_waterfalls(layout, found), windows, strict=True):
        assert sum(classes.values()) == pytest.approx(window)
        assert all(ms >= 0 for ms in classes.values())
        assert classes["gemm_ideal"] > 0
        axes = {"tp": layout == "tp2", "dp": layout == "dp2", "bubble": layout in ("pp2", "shared")}
        for axis, there in axes.items():
            assert (classes[axis] > 0.05 * window / 10) or not there, (axis, classes)
            # a busy machine's noise: what is not there was 2 % of a step once
            assert there or classes[axis] < 0.05 * window, (axis, classes)


@pytest.mark.parametrize(
    ("layout", "delayed"),
    [
        *(("tp2", work) for work in ("gemm", "attention", "elementwise", "optimizer", "host")),
        *(("tp2", "tp"), ("dp2", "dp"), ("dp2", "attention"), ("pp2", "gemm"), ("pp2", "pp")),
    ],
)
def test_a_delay_of_5_ms_is_found_in_its_class(layout: str, delayed: str) -> None:
    """By a clock on which nothing else takes time: 5 ms in every call of a class."""
    before = _waterfalls(layout, _undelayed(layout))
    found = _run(layout, delayed=delayed, seconds=0.005, quiet=True)
    for one, quiet, late in zip(found, before, _waterfalls(layout, found), strict=True):
        slept_ms = statistics.fmean(one.slept_ns[1:4]) / 1e6
        assert slept_ms >= 5
        grown = {name: late[name] - quiet[name] for name in late}
        if delayed == "gemm":
            grown["gemm"] = grown.pop("gemm_ideal") + grown.pop("gemm_inefficiency")
        assert grown.pop(delayed) == pytest.approx(slept_ms, rel=0.1), (quiet, late)
        assert all(abs(ms) < 0.1 * slept_ms for ms in grown.values()), grown


@cache
def _undelayed(layout: str) -> list[Measured]:
    return _run(layout, quiet=True)


@pytest.mark.full
def test_a_slow_stage_is_the_bubble_of_the_other() -> None:
    """By the monotonic clock: the other stage waits, and no transfer is late."""
    found = _run("pp2", delayed="bubble", seconds=0.04)
    first, last = _waterfalls("pp2", found)
    slept_ms = statistics.fmean(found[0].slept_ns[1:4]) / 1e6
    assert first["gemm_inefficiency"] == pytest.approx(slept_ms, rel=0.1)
    assert last["bubble"] == pytest.approx(slept_ms, rel=0.1)
    assert last["pp"] < 0.1 * last["bubble"]


@pytest.mark.parametrize("marks", [False, True])
def test_a_graph_has_the_probes_nodes_only_where_it_is_attached(marks: bool) -> None:
    config = load_config(None, [*SMALL, "model.num_layers=1"])
    assembly = assemble(config, config.mesh(1), torch.device("cpu"))
    if marks:
        attach(Probe(NullRecorder()), assembly)
    tokens = torch.zeros(16, dtype=torch.int64)
    y = assembly.chunks[0](tokens, make_context(1, 16))
    names, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        names.add(type(node).__name__)
        todo += [above for above, _ in node.next_functions if above is not None]
    assert ("_ToldBackward" in names) is marks, names
