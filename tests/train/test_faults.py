"""Faults on order: who has them, when, how often; and that each does what its name says."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.config import load_config
from megascale.errors import NumericalError
from megascale.flux import collectives
from megascale.train import faults, pace
from megascale.train.assemble import Assembly, assemble
from megascale.train.faults import Faults, ordered
from megascale.train.pace import Pace, pace_file
from megascale.train.replicas import check_replicas
from megascale.train.step import train_step
from tests.distributed import run_ranks
from tests.train.harness import TINY, make_loader

SMALL = [*TINY, "model.num_layers=2", "training.global_batch_size=4"]


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    config = load_config(None, SMALL)
    return assemble(config, config.mesh(1), torch.device("cpu"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """(step, order) of each fault, which does nothing else."""
    found: list[tuple[int, dict[str, Any]]] = []
    for kind in faults._KINDS:
        monkeypatch.setitem(faults._KINDS, kind, lambda _self, order, at: found.append((at, order)))
    return found


def _order(folder: Path, *orders: dict[str, Any]) -> Path:
    file = folder / "orders.json"
    new = folder / "new"
    new.write_text(json.dumps(orders))
    new.replace(file)
    return file


def _step(hook: Faults, *steps: int) -> None:
    for step in steps:
        hook.on_step_start(step)
        hook.on_step_end(step)


def test_an_order_is_obeyed_once_by_whom_it_names(
    tmp_path: Path, assembly: Assembly, seen: list[Any]
) -> None:
    file = tmp_path / "orders.json"
    hook, other = Faults(file, assembly, 1, 3), Faults(file, assembly, 0, 3)
    _step(hook, 4)
    assert seen == [], "there is no file yet"
    _order(tmp_path, {"id": "7", "kind": "segv", "ranks": [1]})
    _step(other, 5)
    _step(hook, 5, 6)
    assert [step for step, _ in seen] == [5]
    marker = json.loads((tmp_path / "done" / "7-1-0.json").read_text())
    assert (marker["step"], marker["epoch"]) == (5, 3)
    assert abs(time.monotonic_ns() - marker["monotonic_ns"]) < 60e9
    _step(Faults(file, assembly, 1, 4), 5, 6)
    assert len(seen) == 1, "a restarted rank does not have it again"


def test_orders_that_come_later_and_at_a_step(
    tmp_path: Path, assembly: Assembly, seen: list[Any]
) -> None:
    hook = Faults(_order(tmp_path), assembly, 0, 1)
    _step(hook, 1)
    first = {"id": "1", "kind": "abort", "ranks": [0, 1], "step": 4}
    _order(tmp_path, first)
    _step(hook, 2, 3)
    assert seen == []
    _order(tmp_path, first, {"id": "2", "kind": "exit", "ranks": [0], "code": 3})
    _step(hook, 4, 5)
    assert [(step, order["kind"]) for step, order in seen] == [(4, "abort"), (4, "exit")]
    assert seen[1][1]["code"] == 3
    assert seen[0][1]["code"] == 17, "what is not said has its default"


def test_the_same_fault_at_the_same_step_in_each_epoch(
    tmp_path: Path, assembly: Assembly, seen: list[Any]
) -> None:
    file = _order(tmp_path, {"id": "1", "kind": "segv", "ranks": [0], "step": 5, "times": 2})
    for epoch in (1, 2, 3):
        _step(Faults(file, assembly, 0, epoch), 4, 5, 6)
    assert [step for step, _ in seen] == [5, 5]


def test_what_must_precede_a_comparison_waits_for_it(tmp_path: Path, seen: list[Any]) -> None:
    config = load_config(None, [*SMALL, "debug.check_replicas_interval=4", "checkpoint.interval=3"])
    every_four = assemble(config, config.mesh(1), torch.device("cpu"))
    file = _order(
        tmp_path,
        {"id": "1", "kind": "flip", "ranks": [0]},
        {"id": "2", "kind": "kill_in_save", "ranks": [0]},
    )
    _step(Faults(file, every_four, 0, 1), *range(1, 10))
    assert [(step, order["kind"]) for step, order in seen] == [(3, "kill_in_save"), (4, "flip")]


# ---------------------------------------------------------------- what they do


def _loss(assembly: Assembly, step: int) -> tuple[float, float, bool]:
    """(loss, norm, masked) of a step."""
    loader = make_loader(assembly.config, assembly.groups.coordinates.dp_rank, assembly.mesh.data)
    size = assembly.config.training.global_batch_size
    batch = loader.read(step * size, size)
    outcome = train_step(assembly, batch.micro_batches, global_batch=size, lr=0.0)
    loss, norm, masked, *_ = outcome.summary.read()
    return loss, norm, bool(masked)


def _hit(assembly: Assembly, folder: Path, kind: str, **options: Any) -> Faults:
    file = _order(folder, {"id": "1", "kind": kind, "ranks": [0], **options})
    hook = Faults(file, assembly, 0, 1)
    hook.on_step_start(2)
    return hook


@pytest.mark.full
def test_values_are_wrong_for_one_step_alone(tmp_path: Path, assembly: Assembly) -> None:
    right = _loss(assembly, 2)
    for kind in ("nan", "spike"):
        folder = tmp_path / kind
        folder.mkdir()
        hook = _hit(assembly, folder, kind)
        loss, _, masked = _loss(assembly, 2)
        assert masked is (kind == "nan")
        assert (loss == right[0]) is (kind == "nan"), "a gradient is no part of the loss"
        hook.on_step_start(3)
        assert _loss(assembly, 2) == right


def test_slow_is_so_for_each_micro_batch_of_its_steps(
    tmp_path: Path, assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    hook = _hit(assembly, tmp_path, "slow", seconds=0.15)
    monkeypatch.setattr("megascale.train.faults.time.sleep", slept.append)
    _loss(assembly, 2)
    assert slept == [0.15] * 4  # four micro-batches
    hook.on_step_start(3)
    _loss(assembly, 2)
    assert len(slept) == 4


def test_slow_by_a_share_of_the_usual_step(
    tmp_path: Path, assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = Faults(tmp_path / "orders.json", assembly, 0, 1)
    hook.on_step_start(1)
    time.sleep(0.4)
    _order(tmp_path, {"id": "1", "kind": "slow", "ranks": [0], "share": 0.5, "seconds": 99.0})
    hook.on_step_start(2)
    usual_s = hook._began_s[1] - hook._began_s[0]
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    _loss(assembly, 2)
    assert waits == [pytest.approx(0.5 * usual_s / 4)] * 4, "half a step, in four micro-batches"
    hook.on_step_start(3)
    _loss(assembly, 2)
    assert len(waits) == 4


def test_no_room_and_no_memory(tmp_path: Path, assembly: Assembly) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        _hit(assembly, tmp_path, "disk_full")
    before = resource.getrlimit(resource.RLIMIT_AS)
    (tmp_path / "memory").mkdir()
    try:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            _hit(assembly, tmp_path / "memory", "out_of_memory", megabytes=64)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_mistake_of_the_program(tmp_path: Path, assembly: Assembly) -> None:
    with pytest.raises(ValueError, match="a mistake of the program at step 2"):
        _hit(assembly, tmp_path, "exception")


def test_a_skipped_collective_is_the_next_one_of_the_world_alone(
    tmp_path: Path, assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def real(_tensor: object, *_rest: object, **named: object) -> str:
        called.append(str(named.get("group")))
        return "work"

    monkeypatch.setattr(dist, "all_reduce", real)
    _hit(assembly, tmp_path, "skip_collective")
    assert dist.all_reduce(torch.zeros(1), group="data") == "work"
    skipped = dist.all_reduce(torch.zeros(1), async_op=True)
    assert called == ["data"]
    assert skipped is not None
    assert skipped.wait()
    dist.all_reduce(torch.zeros(1), async_op=True)
    assert called == ["data", "None"]


@pytest.mark.parametrize(("group", "skips"), [(1, "tensor"), (2, "data"), (3, "send")])
def test_a_skipped_collective_of_another_group(
    tmp_path: Path, assembly: Assembly, monkeypatch: pytest.MonkeyPatch, group: int, skips: str
) -> None:
    called: list[object] = []
    places = [(dist, "all_reduce"), (collectives, "_gather_single"), (dist, "isend")]
    for module, name in places:
        monkeypatch.setattr(module, name, lambda *_, **named: called.append(named["group"]))
    monkeypatch.setattr(assembly.groups, "tensor", "tensor")
    monkeypatch.setattr(assembly.groups, "data", "data")
    _hit(assembly, tmp_path, "skip_collective", group=group)
    for _ in range(2):
        dist.all_reduce(torch.zeros(1), group="data")
        collectives._gather_single(torch.zeros(2), torch.zeros(1), group="tensor")
        dist.isend(torch.zeros(1), 1, group="send")  # type: ignore[arg-type]
    everything = ["data", "tensor", "send"]
    assert called == [*(one for one in everything if one != skips), *everything]


def _flip_one(rank: int, world_size: int, folder: str) -> int:
    config = load_config(None, [*SMALL, "debug.check_replicas_interval=1"])
    assembly = assemble(config, config.mesh(world_size), torch.device("cpu"))
    assembly.zero.wait_for_parameters()
    flat = assembly.zero.buckets[0].parameters
    before = flat.clone().view(torch.int32)
    file = Path(folder) / "orders.json"
    hook = Faults(file, assembly, rank, 1)
    hook.on_step_start(1)
    hook.on_step_end(1)
    with pytest.raises(NumericalError, match="parameters differ"):
        check_replicas(assembly, "after")
    changed = before ^ flat.view(torch.int32)
    return sum(bin(word & 0xFFFFFFFF).count("1") for word in changed.tolist())


@pytest.mark.full
def test_one_bit_of_one_replica(tmp_path: Path) -> None:
    _order(tmp_path, {"id": "1", "kind": "flip", "ranks": [1]})
    assert run_ranks(_flip_one, 2, str(tmp_path)) == [0, 1]


def test_a_paced_rank_sleeps_its_seconds_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, SMALL)
    assembly = assemble(config, config.mesh(1), torch.device("cpu"))
    orders = tmp_path / "orders.json"
    assert [type(hook) for hook in ordered(str(orders), assembly, 0, 1)] == [Faults]
    pace_file(orders).write_text(json.dumps([[9.0, 0.4], [9.0, 0.8]]))  # of rank 0 and of rank 1
    hooks = ordered(str(orders), assembly, 1, 1)
    assert [type(hook) for hook in hooks] == [Faults, Pace]
    slept: list[float] = []
    monkeypatch.setattr(pace, "sleep", slept.append)
    batch = make_loader(config, 0, 1).read(0, 4)
    for step in range(1, 4):
        for hook in hooks:
            hook.on_step_start(step)
        train_step(assembly, batch.micro_batches, global_batch=4, lr=0.0)
    # four micro-batches a step; the table is used in turn
    assert slept == pytest.approx([0.2] * 4 + [0.1] * 4 + [0.2] * 4)
