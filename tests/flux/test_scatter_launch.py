"""What a call of the fused Hopper GEMM + reduce-scatter launches and queues, in which order."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter

pytest.importorskip("triton")

from megascale.flux.gemm_reduce_scatter import hopper_launch, staging
from megascale.flux.tiles import ceil_div
from megascale.kernels.remembered import Remembered

COPY_STREAM, STREAM = 7, 3
CONFIG = FusedReduceScatter("hopper", chunks=2)
M, N, K, WORLD = 8192, 512, 256, 2


class _Recorder:
    """Arena, slot and kernels of a rank that writes down what happens to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.stream, self.collects = STREAM, gc.isenabled()
        memory = [torch.zeros(M * N * 2, dtype=torch.uint8) for _ in range(WORLD)]
        flags = [torch.zeros(1024, dtype=torch.int32) for _ in range(WORLD)]
        self.slot: Any = _Slot(memory, flags)
        self.arena: Any = _Arena(self.events)
        monkeypatch.setattr(hopper_launch, "_calls", Remembered(16))
        monkeypatch.setattr(hopper_launch, "loaded", self._loaded)
        monkeypatch.setattr(hopper_launch, "KernelCall", self._made)
        monkeypatch.setattr(hopper_launch, "current_stream", lambda _: self.stream)
        monkeypatch.setattr(staging, "driver", lambda: SimpleNamespace(taking=tuple))
        staging._launches_block.cache_clear()

    def _loaded(self, _kernel: Any, _device: Any, arguments: Any, constants: Any) -> str:
        tiles = ceil_div(M // WORLD, CONFIG.block_m) * ceil_div(N, CONFIG.block_n)
        assert 0 < arguments["tiles_a_chunk"] <= tiles
        kind = "staged" if constants["STAGED"] else "direct"
        self.events.append(f"load {kind}")
        return kind

    def _made(self, kind: str, *_: Any) -> Any:
        def launch(stream: int, operands: Any) -> None:
            assert stream == self.stream
            assert (operands.room is operands.out) == (kind == "direct")
            self.events.append(f"launch {kind}")
            self.collects = gc.isenabled()

        return SimpleNamespace(launch=launch)

    def call(self, config: FusedReduceScatter = CONFIG) -> list[str]:
        self.events.clear()
        x, weight = torch.zeros(M, K).bfloat16(), torch.zeros(N, K).bfloat16()
        out = torch.zeros(M // WORLD, N).bfloat16()
        hopper_launch.launch(x, weight, None, out, self.slot, self.arena, config, "NK")
        return [*self.events]


class _Slot:
    rank, world_size = 0, WORLD

    def __init__(self, data: Any, flags: Any) -> None:
        self.data, self.flags = data, flags
        self.data_ptrs = self.flag_ptrs = torch.zeros(WORLD, dtype=torch.int64)

    def view(self, owner: int, shape: Any, dtype: torch.dtype) -> Any:
        return self.data[owner].view(dtype).view(*shape)


class _Arena:
    device = torch.device("cpu")
    num_sms, deadline_ns, capturing, copy_stream = 132, 0, False, COPY_STREAM

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.one = self.done = torch.zeros(64, dtype=torch.int32)
        self.report = torch.zeros(8, dtype=torch.int64)

    def fork(self) -> None:
        self._events.append("fork")

    def carry(self, *_: Any) -> None:
        self._events.append("carry")

    def join(self) -> None:
        self._events.append("join")


STAGED = ["fork", "launch staged", "carry", "carry", "join"]


def test_both_kernels_are_loaded_before_anything_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = _Recorder(monkeypatch)
    assert rank.call() == ["load direct", "load staged", *STAGED]
    assert rank.call() == STAGED
    assert not rank.collects, "a finalizer may wait for the device while peers wait for the copies"
    assert gc.isenabled()


def test_it_is_not_staged_where_it_would_stand_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = _Recorder(monkeypatch)
    rank.call()
    rank.arena.capturing = True
    assert rank.call() == ["launch direct"]
    rank.arena.capturing, rank.stream = False, COPY_STREAM
    assert rank.call() == ["launch direct"]
    rank.stream = STREAM
    assert rank.call(replace(CONFIG, chunks=0)) == ["load direct", "launch direct"]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    staging._launches_block.cache_clear()
    assert rank.call() == ["launch direct"]
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    staging._launches_block.cache_clear()
    assert rank.call() == STAGED
