"""Batches on the device: the host's values, taken early, counted, thrown away with errors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.config import load_config
from megascale.data import GlobalBatch, MicroBatch
from megascale.errors import DataError
from megascale.parallel.spans import no_span
from megascale.train.batches import Buffers, DeviceBatches, on_device
from megascale.train.program import DeviceBatch, StageProgram
from tests.distributed import run_ranks

B, S = 2, 6


def _micro_batch(seed: int, *, documents: bool = False) -> MicroBatch:
    random = np.random.default_rng(seed)
    starts = np.zeros((B, S), np.int32)
    starts[1, 3:] = 3
    return MicroBatch(
        random.integers(0, 99, (B, S + 1), dtype=np.int32),
        random.integers(0, 2, (B, S)).astype(np.bool_),
        np.arange(B) + B * seed,
        starts if documents else None,
    )


def _batch(step: int, num: int = 3, *, documents: bool = False) -> GlobalBatch:
    micro = tuple(_micro_batch(step * num + i, documents=documents) for i in range(num))
    return GlobalBatch(step * num * B, num * B, micro)


def _program(device: str = "cpu", dtype: torch.dtype = torch.float64) -> StageProgram:
    config = load_config(None, ["model.vocab_size=100", "data.synthetic=true"])
    groups = SimpleNamespace(tensor=None)
    program = SimpleNamespace(
        config=config, groups=groups, device=torch.device(device), main_dtype=dtype
    )
    return cast(StageProgram, program)


class _Source:
    """Steps in order; `late` ones are not ready, an error is raised in its turn."""

    def __init__(self, *steps: GlobalBatch | Exception) -> None:
        self._steps = deque(steps)
        self.ready = True
        self.num_taken = 0
        self.closed = False

    def __next__(self) -> GlobalBatch:
        self.num_taken += 1
        step = self._steps.popleft()
        if isinstance(step, Exception):
            raise step
        return step

    def is_ready(self) -> bool:
        return self.ready

    def close(self) -> None:
        self.closed = True


def _same(got: Sequence[DeviceBatch], expected: Sequence[MicroBatch]) -> None:
    for device, host in zip(got, expected, strict=True):
        assert device.tokens_T.tolist() == host.tokens_BS.ravel().tolist()
        assert device.labels_T.tolist() == host.labels_BS.ravel().tolist()
        assert device.mask_T.tolist() == host.loss_mask_BS.ravel().astype(float).tolist()
        context = device.context
        assert context.sample_numbers_B is not None
        assert context.token_ids_t is not None
        assert context.sample_numbers_B.tolist() == host.sample_numbers_B.tolist()
        positions = np.broadcast_to(np.arange(S), (B, S))
        ids = host.sample_numbers_B[:, None] * S + positions
        assert context.token_ids_t.tolist() == ids.ravel().tolist()
        if host.document_starts_BS is None:
            assert context.documents is None
        else:
            positions = positions - host.document_starts_BS
            assert context.documents is not None
            assert context.documents.starts_BS.tolist() == host.document_starts_BS.tolist()
            assert context.documents.bounds_N.tolist() == [0, 6, 9, 12]
        assert context.positions_t.tolist() == positions.ravel().tolist()
        assert device.tokens_T.dtype == device.labels_T.dtype == torch.int64


@pytest.mark.parametrize("documents", [False, True])
def test_values_are_those_of_the_host(documents: bool) -> None:
    batch = _batch(1, documents=documents)
    program = _program()
    _same(on_device(program, batch.micro_batches, training=True), batch.micro_batches)
    assert on_device(program, batch.micro_batches, training=True)[0].mask_T.dtype == torch.float64


def test_steps_are_taken_early_and_in_order() -> None:
    source = _Source(*(_batch(n) for n in range(4)))
    batches = DeviceBatches(source, _program())
    first = next(batches)
    assert (first.first_sample, first.num_samples, source.num_taken) == (0, 6, 1)
    batches.prefetch()
    batches.prefetch()  # a step ahead, no more
    assert source.num_taken == 2
    _same(first.batches, _batch(0).micro_batches)  # still there while the next one is
    for n in range(1, 4):
        step = next(batches)
        assert step.first_sample == 6 * n
        assert source.num_taken == n + 1
        if n < 3:
            batches.prefetch()
        _same(step.batches, _batch(n).micro_batches)


def test_a_loader_that_has_nothing_yet_is_not_waited_for() -> None:
    source = _Source(_batch(0), _batch(1))
    source.ready = False
    batches = DeviceBatches(source, _program())
    batches.prefetch()
    assert source.num_taken == 0
    assert next(batches).first_sample == 0
    behind = DeviceBatches(_Source(_batch(0)), _program(), ahead=False)
    behind.prefetch()
    assert next(behind).first_sample == 0


def test_an_error_waits_for_the_next_that_needs_the_batch() -> None:
    batches = DeviceBatches(_Source(_batch(0), DataError("x.bin is damaged")), _program())
    next(batches)
    batches.prefetch()
    with pytest.raises(DataError, match=r"x\.bin is damaged"):
        next(batches)


def test_what_was_taken_early_goes_with_its_object() -> None:
    source = _Source(_batch(0), _batch(1))
    batches = DeviceBatches(source, _program())
    next(batches)
    batches.prefetch()
    batches.close()
    assert source.closed
    again = DeviceBatches(_Source(_batch(1)), _program())
    assert next(again).first_sample == 6


def test_buffers_are_made_once() -> None:
    """Four addresses for the tokens of eight steps at most: two sets, of the largest step."""
    source = _Source(*(_batch(n, num=3) for n in range(8)))
    batches = DeviceBatches(source, _program())
    addresses = []
    for _ in range(8):
        addresses.append(next(batches).batches[0].tokens_T.data_ptr())
        batches.prefetch() if source._steps else None
    assert len({*addresses}) == 2
    assert addresses[0] == addresses[2]


def test_waits_are_counted_where_they_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(_Source):
        def __next__(self) -> GlobalBatch:
            now[0] += 0.5
            return super().__next__()

    spans: list[str] = []

    def span(name: str, /, **fields: Any) -> Any:
        spans.append(name)
        assert fields == {"host": True}
        return no_span(name)

    batches = DeviceBatches(Slow(_batch(0), _batch(1)), _program(), span=span)
    next(batches)
    assert batches.take_waited_s() == 0.5
    batches.prefetch()
    assert batches.take_waited_s() == 0.5
    next(batches)
    assert batches.take_waited_s() == 0.0
    assert spans == ["data_wait"] * 3


def _on_cuda(_rank: int, _world_size: int) -> list[int]:
    program = _program("cuda", torch.float32)
    source = _Source(*(_batch(n, documents=n % 2 == 1) for n in range(6)))
    batches = DeviceBatches(source, program)
    assert batches._stream is not None
    assert batches._stream != torch.cuda.current_stream()
    busy = torch.randn(2048, 2048, device="cuda")
    seen: list[tuple[Tensor, GlobalBatch]] = []
    for n in range(6):
        step = next(batches)
        for _ in range(20):  # the compute stream is far behind the host
            busy = busy @ busy * 1e-3
        seen.append((torch.cat([b.tokens_T for b in step.batches]), _batch(n)))
        if n < 5:
            batches.prefetch()
        if n % 2 == 0:
            _same(step.batches, _batch(n).micro_batches)
    for tokens, batch in seen:
        expected = np.concatenate([m.tokens_BS.ravel() for m in batch.micro_batches])
        assert tokens.tolist() == expected.tolist()
    buffers = Buffers(torch.device("cuda"))
    buffers.put("windows", [np.zeros((2, 3), np.int32)])
    return [int(buffers._host["windows"].is_pinned())]


@pytest.mark.gpu
def test_a_copy_on_its_own_stream_gives_the_same_values() -> None:
    assert run_ranks(_on_cuda, 1, cuda=True) == [[1]]
