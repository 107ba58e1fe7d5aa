"""The pipeline runtime against the unsplit network and against torch.distributed.pipelining."""

from __future__ import annotations

import random
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megascale.ops.linear import linear
from megascale.parallel import pipeline
from megascale.parallel.pipeline import PipelineRuntime
from megascale.parallel.spans import Span, no_span
from megascale.parallel.transfers import create_links
from megascale.plan.actions import ActionKind
from megascale.topology import Mesh
from tests.distributed import run_ranks

HIDDEN, ROWS = 6, 5
CPU = torch.device("cpu")
TOLERANCE = 1e-12  # relative, fp64: the sums differ in order alone

Gradients = dict[str, list[float]]
"""By parameter, flat: what a rank sends back must outlive it, and a shared tensor does not."""


class Chunk(nn.Module):
    """A residual layer, not symmetric in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(linear(x, self.linear.weight, self.linear.bias))


def _network(num_chunks: int) -> list[Chunk]:
    torch.manual_seed(7)
    return [Chunk() for _ in range(num_chunks)]


def _batch(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    x, target = torch.randn(2, ROWS, HIDDEN, dtype=torch.float64, generator=generator)
    return x, target


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).mean()


def _take_gradients(chunks: dict[int, Chunk]) -> Gradients:
    taken: Gradients = {}
    for chunk, module in chunks.items():
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            taken[f"{chunk}.{name}"] = parameter.grad.flatten().tolist()
            parameter.grad = None
    return taken


class Program:
    """The chunks of one stage."""

    hidden_shape = (ROWS, HIDDEN)
    hidden_dtype = torch.float64

    def __init__(
        self, stage: int, stages: int, num_chunks: int, device: torch.device = CPU
    ) -> None:
        self.device = device
        network = _network(num_chunks)
        self.chunks = {c: network[c].to(device) for c in range(stage, num_chunks, stages)}
        self.last_chunk = num_chunks - 1
        self.step = 0

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> Tensor:
        tokens, target = (t.to(self.device) for t in _batch(self.step, micro_batch))
        y: Tensor = self.chunks[chunk](tokens if x is None else x)
        return _loss(y, target) if chunk == self.last_chunk else y

    def take_gradients(self) -> Gradients:
        return _take_gradients(self.chunks)


def _reference(num_chunks: int, micro_batches: int, step: int) -> tuple[list[float], Gradients]:
    network = _network(num_chunks)
    losses = []
    for m in range(micro_batches):
        y, target = _batch(step, m)
        for chunk in network:
            y = chunk(y)
        loss = _loss(y, target)
        loss.backward()
        losses.append(loss.item())
    return losses, _take_gradients(dict(enumerate(network)))


def _floats(losses: list[Tensor]) -> list[float]:
    return [loss.item() for loss in losses]


def _runtime(
    rank: int, stages: int, v: int, schedule: str, transfers: str, **options: Any
) -> tuple[Program, PipelineRuntime]:
    program = options.pop("program", None) or Program(rank, stages, stages * v)
    links = create_links(Mesh(pipeline=stages), wrap=v > 1, device=program.device, timeout_s=30.0)
    return program, PipelineRuntime(
        program,
        stage=rank,
        stages=stages,
        chunks_per_stage=v,
        schedule=schedule,
        transfers=transfers,
        links=links,
        **options,
    )


def _run_steps(
    rank: int,
    stages: int,
    v: int,
    schedule: str,
    transfers: str,
    counts: list[int],
    delay_s: float,
    device: str,
    joined: int,
) -> list[tuple[list[float], Gradients]]:
    span = _random_delays(rank, delay_s) if delay_s else no_span
    place = torch.device(device, rank) if device == "cuda" else CPU
    if device == "cuda":
        torch.cuda.set_device(place)
    program = Program(rank, stages, stages * v, place)
    options = {"span": span, "program": program, "join_weight_gradients": joined}
    _, runtime = _runtime(rank, stages, v, schedule, transfers, **options)
    results = []
    for step, micro_batches in enumerate(counts):
        program.step = step
        losses = runtime.run(micro_batches)
        results.append((_floats(losses), program.take_gradients()))
    return results


def _random_delays(rank: int, most_s: float) -> Span:
    """Sleeps before every action, another time on every rank."""
    chance = random.Random(rank)

    def span(_name: str, /, **_fields: Any) -> AbstractContextManager[Any]:
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0.0, most_s))
        return nullcontext()

    return span


def _assert_equal(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = np.abs(np.subtract(actual[name], gradient)).max() / np.abs(gradient).max()
        assert error < TOLERANCE, (name, error)


def _assert_steps_equal_the_unsplit_network(
    stages: int,
    v: int,
    schedule: str,
    transfers: str,
    counts: list[int],
    delay_s: float = 0.0,
    device: str = "cpu",
    joined: int = 1,
) -> None:
    ranks = run_ranks(_run_steps, stages, v, schedule, transfers, counts, delay_s, device, joined)
    for step, micro_batches in enumerate(counts):
        losses, gradients = _reference(stages * v, micro_batches, step)
        merged: Gradients = {}
        for rank in ranks:
            merged |= rank[step][1]
        _assert_equal(merged, gradients)
        assert [len(rank[step][0]) for rank in ranks[:-1]] == [0] * (stages - 1)
        assert ranks[-1][step][0] == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.parametrize("transfers", ["decoupled", "coupled"])
@pytest.mark.parametrize(
    ("stages", "v", "schedule"),
    [
        (1, 1, "1f1b"),
        (2, 1, "gpipe"),
        (2, 1, "1f1b"),
        (3, 1, "1f1b"),
        (4, 1, "1f1b"),
        (2, 2, "interleaved_1f1b"),
        (3, 2, "interleaved_1f1b"),
        (4, 2, "interleaved_1f1b"),
        (1, 1, "zb_h1"),
        (2, 1, "zb_h1"),
        (4, 1, "zb_h1"),
        (2, 2, "interleaved_zb"),
        (3, 2, "interleaved_zb"),
    ],
)
def test_gradients_equal_the_unsplit_network(
    stages: int, v: int, schedule: str, transfers: str
) -> None:
    """Three steps on the same runtime, the number of micro-batches changing between them."""
    counts = [2 * stages, 4 * stages, stages]
    _assert_steps_equal_the_unsplit_network(stages, v, schedule, transfers, counts)


@pytest.mark.parametrize("transfers", ["decoupled", "coupled"])
@pytest.mark.parametrize(
    ("stages", "v", "schedule", "joined"),
    [
        (1, 1, "1f1b", 3),
        (2, 1, "gpipe", 3),
        (2, 1, "1f1b", 2),
        (2, 2, "interleaved_1f1b", 4),
        (3, 2, "interleaved_1f1b", 2),
        (2, 1, "zb_h1", 3),
        (2, 2, "interleaved_zb", 2),
        (2, 2, "interleaved_zb", 100),
    ],
)
def test_joined_weight_gradients_equal_the_unsplit_network(
    stages: int, v: int, schedule: str, joined: int, transfers: str
) -> None:
    """Also where the number does not divide the micro-batches, and where it is beyond them."""
    counts = [2 * stages, 4 * stages, stages]
    _assert_steps_equal_the_unsplit_network(stages, v, schedule, transfers, counts, joined=joined)


@pytest.mark.parametrize("transfers", ["decoupled", "coupled"])
def test_soak_short(transfers: str) -> None:
    _assert_steps_equal_the_unsplit_network(
        4, 2, "interleaved_1f1b", transfers, [8] * 4, delay_s=0.004
    )


@pytest.mark.slow
@pytest.mark.parametrize("transfers", ["decoupled", "coupled"])
def test_soak_long(transfers: str) -> None:
    """Four stages, two chunks each, random delays before every action (Megatron-LM PR 5240)."""
    _assert_steps_equal_the_unsplit_network(
        4, 2, "interleaved_1f1b", transfers, [8, 16, 4] * 20, delay_s=0.01
    )


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transfers", ["decoupled", "coupled"])
@pytest.mark.parametrize(
    ("v", "schedule", "joined"),
    [
        (1, "1f1b", 1),
        (2, "interleaved_1f1b", 1),
        (2, "interleaved_1f1b", 3),
        (1, "zb_h1", 1),
        (2, "interleaved_zb", 1),
        (2, "interleaved_zb", 2),
    ],
)
def test_gradients_on_gpus(v: int, schedule: str, joined: int, transfers: str) -> None:
    """NCCL: host delays shift the two ranks' streams against each other."""
    _assert_steps_equal_the_unsplit_network(
        2, v, schedule, transfers, [4, 8, 2] * 3, delay_s=0.01, device="cuda", joined=joined
    )


def _torch_pipelining(
    rank: int, stages: int, v: int, micro_batches: int
) -> tuple[list[float], Gradients]:
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
    )

    num_chunks = stages * v
    program = Program(rank, stages, num_chunks)
    parts: list[Any] = [
        PipelineStage(module, c, num_chunks, CPU) for c, module in program.chunks.items()
    ]
    options: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
    schedule: Any = (
        Schedule1F1B(parts[0], micro_batches, **options)
        if v == 1
        else ScheduleInterleaved1F1B(parts, micro_batches, **options)
    )
    batches = [_batch(0, m) for m in range(micro_batches)]
    inputs = [torch.cat([x for x, _ in batches])] if rank == 0 else []
    losses: list[Tensor] = []
    if rank == stages - 1:
        schedule.step(*inputs, target=torch.cat([t for _, t in batches]), losses=losses)
    else:
        schedule.step(*inputs)
    return _floats(losses), program.take_gradients()


def _both(rank: int, stages: int, v: int, micro_batches: int) -> tuple[Any, Any]:
    schedule = "interleaved_1f1b" if v > 1 else "1f1b"
    program, runtime = _runtime(rank, stages, v, schedule, "decoupled")
    ours = _floats(runtime.run(micro_batches)), program.take_gradients()
    return ours, _torch_pipelining(rank, stages, v, micro_batches)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("stages", "v"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_gradients_equal_torch_distributed_pipelining(stages: int, v: int) -> None:
    for ours, theirs in run_ranks(_both, stages, v, 2 * stages):
        assert ours[0] == pytest.approx(theirs[0], rel=TOLERANCE)
        _assert_equal(ours[1], theirs[1])


def _validate(rank: int, stages: int, v: int, counts: list[int]) -> list[list[float]]:
    program, runtime = _runtime(rank, stages, v, "interleaved_1f1b", "decoupled")
    runtime.run(stages)
    program.take_gradients()
    losses = [_floats(runtime.run_forward(count)) for count in counts]
    assert all(p.grad is None for chunk in program.chunks.values() for p in chunk.parameters())
    return losses


def test_validation_runs_forward_only_with_any_number_of_micro_batches() -> None:
    counts = [1, 3, 4]
    ranks = run_ranks(_validate, 2, 2, counts)
    assert ranks[0] == [[]] * 3
    for count, losses in zip(counts, ranks[1], strict=True):
        assert losses == pytest.approx(_reference(4, count, 0)[0], rel=TOLERANCE)


def _events(
    rank: int, stages: int, v: int, micro_batches: int, schedule: str, joined: int
) -> list[tuple[Any, ...]]:
    events: list[tuple[Any, ...]] = []

    def span(name: str, /, **fields: Any) -> AbstractContextManager[Any]:
        events.append((name, fields.get("chunk"), fields.get("micro_batch")))
        return nullcontext()

    _, runtime = _runtime(
        rank,
        stages,
        v,
        schedule,
        "decoupled",
        span=span,
        join_weight_gradients=joined,
        on_backward_start=lambda chunk, m, last: events.append(("start", chunk, m, last)),
        on_backward_done=lambda chunk, m, last: events.append(("done", chunk, m, last)),
    )
    runtime.run(micro_batches)
    return events


def test_spans_and_backward_callbacks() -> None:
    for rank, events in enumerate(run_ranks(_events, 2, 2, 4, "interleaved_1f1b", 1)):
        for chunk in (rank, rank + 2):
            done = [event for event in events if event[0] == "done" and event[1] == chunk]
            assert done == [("done", chunk, m, m == 3) for m in range(4)]
            for m in range(4):
                start = events.index(("start", chunk, m, m == 3))
                assert events[start + 1] == ("backward", chunk, m)
                assert events[start + 2] == ("done", chunk, m, m == 3)
                assert ("forward", chunk, m) in events
        names = {event[0] for event in events}
        assert names >= {"send", "recv", "pp_wait", "pp_finish"}


def test_halves_have_spans_and_data_parallelism_hears_of_the_weights() -> None:
    for rank, events in enumerate(run_ranks(_events, 2, 2, 4, "interleaved_zb", 1)):
        for chunk in (rank, rank + 2):
            for m in range(4):
                start = events.index(("start", chunk, m, m == 3))
                assert events[start + 1] == ("backward_weight", chunk, m)
                assert events[start + 2] == ("done", chunk, m, m == 3)
                assert events.index(("backward_input", chunk, m)) < start
        assert "backward" not in {event[0] for event in events}


@pytest.mark.parametrize("schedule", ["interleaved_zb", "interleaved_1f1b"])
def test_joined_weights_are_told_once(schedule: str) -> None:
    for rank, events in enumerate(run_ranks(_events, 2, 2, 4, schedule, 3)):
        for chunk in (rank, rank + 2):
            told = [e for e in events if e[0] in ("start", "done") and e[1] == chunk]
            assert told == [
                ("start", chunk, 2, False),
                ("done", chunk, 2, False),
                ("start", chunk, 3, True),
                ("done", chunk, 3, True),
            ]


@pytest.mark.parametrize(("v", "schedule"), [(1, "gpipe"), (1, "1f1b"), (2, "interleaved_1f1b")])
def test_a_gradient_is_sent_before_joined_weight_gradients(v: int, schedule: str) -> None:
    for rank, events in enumerate(run_ranks(_events, 2, v, 4, schedule, 3)):
        assert "backward" not in {event[0] for event in events}
        for chunk in range(rank, 2 * v, 2):
            for m in range(4):
                place = events.index(("backward_input", chunk, m))
                assert chunk == 0 or events[place + 1] == ("send", chunk, m)
            for m in (2, 3):
                start = events.index(("start", chunk, m, m == 3))
                assert events[start + 1] == ("backward_weight", chunk, m)
                assert events.index(("backward_input", chunk, m)) < start


def _count_waits(rank: int, stages: int, transfers: str) -> tuple[int, int]:
    """Waits for the whole device, and WAIT actions."""
    waits: list[torch.device] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "wait_for_device", waits.append)
        _, runtime = _runtime(rank, stages, 2, "interleaved_1f1b", transfers)
        runtime.run(2 * stages)
    actions = next(iter(runtime._actions.values()))
    return len(waits), sum(action.kind is ActionKind.WAIT for action in actions)


def test_coupled_transfers_wait_for_the_device_each_time_and_decoupled_ones_never() -> None:
    for waits, actions in run_ranks(_count_waits, 2, "coupled"):
        assert waits == actions > 8
    assert run_ranks(_count_waits, 2, "decoupled") == [(0, 0), (0, 0)]


class _InNumpy(torch.autograd.Function):
    """Identity whose result lives in an array that can be watched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watched: list[Any]) -> Tensor:
        array = np.array(x.detach())
        watched.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _WatchedProgram(Program):
    def __init__(self, stage: int, stages: int, num_chunks: int) -> None:
        super().__init__(stage, stages, num_chunks)
        self.outputs: list[Any] = []
        self.alive_before: list[int] = []

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> Tensor:
        self.alive_before.append(sum(array() is not None for array in self.outputs))
        y = super().forward(chunk, micro_batch, x)
        return y if chunk == self.last_chunk else _InNumpy.apply(y, self.outputs)


def _count_living_outputs(rank: int, stages: int) -> list[int]:
    program = _WatchedProgram(rank, stages, stages)
    _, runtime = _runtime(rank, stages, 1, "1f1b", "coupled", program=program)
    runtime.run(2 * stages)
    assert all(array() is None for array in program.outputs)
    return program.alive_before


def test_outputs_are_freed_once_sent() -> None:
    """Coupled transfers wait for each send, so that no output may outlive its exchange."""
    assert run_ranks(_count_living_outputs, 2)[0] == [0, 0, 0, 0]


def _mismatched(rank: int, stages: int) -> str:
    class Wrong(Program):
        hidden_shape = (ROWS, HIDDEN + 1)

    _, runtime = _runtime(rank, stages, 1, "1f1b", "decoupled", program=Wrong(rank, stages, stages))
    if rank == 1:
        return ""
    try:
        runtime.run(stages)
    except AssertionError as error:
        return str(error)
    return "nothing"


def test_a_hidden_state_of_another_shape_is_refused_where_it_is_sent() -> None:
    assert "got (5, 6) torch.float64, the other end expects (5, 7)" in run_ranks(_mismatched, 2)[0]


def test_too_few_micro_batches_are_refused() -> None:
    runtime = PipelineRuntime(
        Program(0, 4, 4), stage=0, stages=4, chunks_per_stage=1, schedule="1f1b"
    )
    with pytest.raises(AssertionError, match="3 micro-batches cannot fill 4 stages"):
        runtime.run(3)
