"""torch's operators over symmetric memory, as far as a CPU shows: in what memory results lie."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from megascale.flux import torch_symm


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank of two, whose peer has the same values; memory is of the CPU."""
    allocated = SimpleNamespace(
        empty=torch.empty, rendezvous=lambda *_args: None, all_reduce=lambda y, _arena: y.mul_(2)
    )
    monkeypatch.setattr(torch_symm, "symm_mem", allocated)
    monkeypatch.setattr(torch_symm, "_sum_in_place", allocated.all_reduce)
    monkeypatch.setattr(torch_symm, "_memories", {})
    monkeypatch.setattr(torch_symm, "_retired", [])
    return _rank_of_two()


def _rank_of_two() -> Any:
    group = SimpleNamespace(group_name="two ranks")
    return SimpleNamespace(group=group, rank=0, world_size=2, device=torch.device("cpu"))


def _sum(form: Any, arena: Any, m: int, value: float, bias: Tensor | None = None) -> Tensor:
    y_TN: Tensor = form(torch.full((m, 4), value), torch.ones(6, 4), bias, arena, layout="NK")
    return y_TN


def test_a_view_holds_until_the_next_call_but_one(arena: Any) -> None:
    bias = torch.full((6,), 1.0)
    results = [_sum(torch_symm.two_shot_view, arena, 3, float(call), bias) for call in range(2)]
    _sum(torch_symm.two_shot_in_place, arena, 3, 99.0)  # of another form: memory of its own
    for call, y_TN in enumerate(results):
        assert torch.equal(y_TN, torch.full((3, 6), 8.0 * call + 1))
    third = _sum(torch_symm.two_shot_view, arena, 3, 2.0)
    assert third.data_ptr() == results[0].data_ptr()
    assert torch.equal(results[1], torch.full((3, 6), 9.0))


def test_both_memories_are_there_after_the_first_call_and_grow_together(arena: Any) -> None:
    """A capture may hold the second call, and nothing is allocated in one."""
    for m in (2, 50):
        _sum(torch_symm.two_shot_view, arena, m, 1.0)
        buffers_of = torch_symm._memory_of(arena).buffers
        sizes = [[b.numel() for b in buffers] for buffers in buffers_of.values()]
        assert len(sizes) == 2
        assert sizes[0] == sizes[1]
        assert sizes[0][-1] >= m * 6 * 4


def test_a_group_of_the_same_name_has_memory_and_turns_of_its_own(arena: Any) -> None:
    """Peers of a group that was made anew do not know the addresses of the one before."""
    forms = [torch_symm.two_shot_in_place, *[torch_symm.two_shot_view] * 3]
    before = [_sum(form, arena, 3, 1.0) for form in forms]  # an odd number of views
    kept = [ref(b[-1]) for b in torch_symm._memory_of(arena).buffers.values()]
    anew = _rank_of_two()
    assert anew.group.group_name == arena.group.group_name
    after = [_sum(form, anew, 3, 2.0) for form in forms]
    assert {y.data_ptr() for y in after}.isdisjoint({y.data_ptr() for y in before})
    first, second = (torch_symm._memory_of(anew).buffers[f"view {turn}"][-1] for turn in (0, 1))
    views = [y_TN.data_ptr() for y_TN in after[1:]]
    del before
    gc.collect()
    assert all(buffer() is not None for buffer in kept), "freed, it would be given out again"
    assert views == [first.data_ptr(), second.data_ptr(), first.data_ptr()], "as on every new rank"
