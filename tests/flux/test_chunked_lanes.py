"""What a chunked call leaves to be done in every call, and what is remembered of a slot."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from megascale.flux import lanes
from megascale.flux.all_gather_gemm import chunked as ag
from megascale.flux.arena import NUM_SLOTS
from megascale.flux.gemm_reduce_scatter import chunked as rs
from tests.flux.simulated_streams import Device, arenas, call, simulate_kernels

M, K, N = 16, 8, 12


def _device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(monkeypatch)
    simulate_kernels(monkeypatch, device)
    return device


def _gather(arena: Any, config: ag.ChunkedAllGather, gathered: bool) -> Any:
    x, weight = torch.zeros(M // 2, K), torch.zeros(N, K)
    return partial(
        ag.all_gather_gemm, x, [weight], [None], arena,
        layout="NK", num_rows=None, gathered=gathered, config=config,
    )  # fmt: skip


def _scatter(arena: Any, config: rs.ChunkedReduceScatter) -> Any:
    x, weight = torch.zeros(M, K), torch.zeros(N, K)
    return partial(rs.gemm_reduce_scatter, x, weight, None, arena, layout="NK", config=config)


def _calls_of(device: Device, arena: Any, form: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a call costs the host once every slot has seen it: calls of the driver and of torch."""
    for _ in range(NUM_SLOTS):
        call(arena, device, form, keep=1)
    monkeypatch.delattr(torch.cuda, "stream")  # 15 us
    device.calls.clear()
    call(arena, device, form, keep=1)
    return {name.removeprefix("aten.").split(".")[0]: count for name, count in device.calls.items()}


# The budget of host time (docstrings of the forms): an operator of torch takes 2 to 25 us, a call
# of the driver 1 to 7.
_JOINED = {"record": 2, "follow": 2}  # the copy stream, there and back
_TWO_LANES = {"record": 4, "follow": 4}
_SENT = {"copy": 1, "write": 2, "wait": 1}
_TORCH = {"t": 1, "new_empty": 1, "slice": 2, "mm": 2}


@pytest.mark.parametrize(
    ("config", "gathered", "wanted"),
    [
        (ag.DEFAULT, False, {**_JOINED, **_SENT, **_TORCH}),
        (ag.DEFAULT, True, {**_TWO_LANES, **_SENT, **_TORCH, "copy": 2}),
        (ag.ChunkedAllGather(two_streams=True), False, {**_TWO_LANES, **_SENT, **_TORCH}),
    ],
    ids=["default", "gathered", "two-streams"],
)
def test_a_gather_of_two_ranks_asks_for_little(
    monkeypatch: pytest.MonkeyPatch,
    config: ag.ChunkedAllGather,
    gathered: bool,
    wanted: dict[str, int],
) -> None:
    device = _device(monkeypatch)
    arena = arenas(2, 1 << 12, device)[0]
    found = _calls_of(device, arena, _gather(arena, config, gathered), monkeypatch)
    assert found == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (rs.DEFAULT, {**_JOINED, **_SENT, **_TORCH, "new_empty": 2}),
        (
            rs.ChunkedReduceScatter(two_streams=True),
            {**_TWO_LANES, **_SENT, **_TORCH, "new_empty": 2},
        ),
    ],
    ids=["default", "two-streams"],
)
def test_a_scatter_of_two_ranks_asks_for_little(
    monkeypatch: pytest.MonkeyPatch, config: rs.ChunkedReduceScatter, wanted: dict[str, int]
) -> None:
    device = _device(monkeypatch)
    arena = arenas(2, 1 << 12, device)[0]
    found = _calls_of(device, arena, _scatter(arena, config), monkeypatch)
    assert found == wanted


def test_with_a_deadline_a_kernel_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _device(monkeypatch)
    arena = arenas(2, 1 << 12, device)[0]
    arena.deadline_ns = 1
    for form in (_gather(arena, ag.DEFAULT, False), _scatter(arena, rs.DEFAULT)):
        for _ in range(NUM_SLOTS + 1):
            call(arena, device, form, keep=1)
    assert device.calls["copy"] == 2 * (NUM_SLOTS + 1)
    assert not device.calls["wait"]


def test_a_kernel_that_waits_is_loaded_once_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another kernel: one that a later call would load only after it has sent."""
    from megascale.flux.symmetric import launch

    loaded: list[int] = []
    arena = arenas(2, 64, _device(monkeypatch))[0]
    monkeypatch.setattr(launch, "waiting", lambda arena, *_, **__: loaded.append(arena.deadline_ns))
    slot = arena._slots[0]
    arrivals = [lanes.Arrival(slot, range(4), per_source=2)]
    for arena.deadline_ns in (0, 0, 5, 5, 0, 7):
        lanes.Lanes(arena, two=False).load(arrivals, slot)
    assert loaded == [0, 5, 7]


def test_the_stream_of_before_is_current_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _device(monkeypatch)
    used = lanes.Lanes(arenas(2, 64, device)[0], two=True)
    before = device.current
    with suppress(ValueError), used.use(1):
        assert device.current is not before
        raise ValueError
    assert device.current is before


def test_plans_go_with_their_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or memory of an arena that has grown would never be given back."""
    device = _device(monkeypatch)
    arena = arenas(2, 1 << 12, device)[0]
    slots = [weakref.ref(slot) for slot in arena._slots]
    for form in (
        _gather(arena, ag.DEFAULT, True),
        _scatter(arena, rs.DEFAULT),
        _scatter(arena, rs.ChunkedReduceScatter(chunks=2, fold=True, store=True)),
    ):
        for _ in range(NUM_SLOTS):
            call(arena, device, form, keep=1)
    for stream in device.streams:
        stream.operations.clear()
    assert all(lanes._plans.count(slot) == 3 for slot in arena._slots)
    arena._slots = []
    gc.collect()
    assert [slot() for slot in slots] == [None] * NUM_SLOTS


def test_gradients_are_off_inside_and_on_again_after_an_error() -> None:
    @lanes.without_grad
    def form(fails: bool) -> bool:
        if fails:
            raise ValueError("inside")
        return torch.is_grad_enabled()

    assert torch.is_grad_enabled()
    assert not form(False)
    assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="inside"):
        form(True)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert not form(False)
        assert not torch.is_grad_enabled()
