"""Scratch memory: whose it is, and whose allocator Triton asks for it."""

from __future__ import annotations

import gc
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.kernels import scratch
from megascale.kernels.kernel_call import KernelCall


class Owner:
    """Stands for an arena."""


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        scratch, "_from_torch", lambda num_bytes, *_: torch.empty(num_bytes, dtype=torch.uint8)
    )


def _call(num_bytes: int, programs: int, owner: Any = None) -> KernelCall:
    """Of a kernel whose only argument is a tensor."""
    metadata = SimpleNamespace(
        num_warps=4, shared=0, global_scratch_size=num_bytes, tensordesc_meta=None
    )
    compiled = SimpleNamespace(
        function=1, src=SimpleNamespace(signature={"x_ptr": "*i32"}), metadata=metadata
    )
    return KernelCall(compiled, {"x_ptr": torch.zeros(4)}, programs, owner)


def test_scratch_outlives_the_calls_of_its_owner_that_share_it() -> None:
    """A graph may hold the address of a launch that is remembered no longer."""
    owner, other = Owner(), Owner()
    kept, same, more = _call(128, 2, owner), _call(64, 4, owner), _call(128, 3, owner)
    assert kept._scratch is not None
    assert kept._scratch.numel() == 256
    assert same._scratch is kept._scratch
    assert more._scratch is not kept._scratch
    assert _call(128, 2, other)._scratch is not kept._scratch
    address = kept._scratch.data_ptr()
    del kept, same, more
    gc.collect()
    assert scratch.scratch_of(owner, 256).data_ptr() == address
    del owner, other
    gc.collect()
    assert not scratch._owned


def test_without_an_owner_a_call_has_its_own_and_without_need_none() -> None:
    calls = [_call(128, 2) for _ in range(2)]
    assert calls[0]._scratch is not calls[1]._scratch
    assert _call(0, 2, Owner())._scratch is None
    del calls
    gc.collect()
    assert not scratch._owned


def test_a_users_allocator_is_asked_again_after_our_launch() -> None:
    triton = pytest.importorskip("triton")
    from triton.runtime._allocation import _NULL_ALLOCATOR, _allocator

    with scratch.scratch_from_torch():
        assert _allocator.get()(96, 64, None).numel() == 96
    assert _allocator.get() is _NULL_ALLOCATOR  # the launches of others still say what is missing
    theirs = torch.empty(1)
    triton.set_allocator(lambda *_: theirs)
    try:
        with suppress(ValueError), scratch.scratch_from_torch():
            assert _allocator.get()(96, 64, None) is not theirs
            raise ValueError
        assert _allocator.get()(96, 64, None) is theirs
    finally:
        triton.set_allocator(_NULL_ALLOCATOR)
