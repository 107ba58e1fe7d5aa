"""What `operators.mode` chooses, and that it reaches every operator of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.errors import ConfigError
from megascale.ops import compiled, mode
from megascale.ops.compiled import MOST_SHAPES, compiled_on_cuda
from megascale.ops.mode import takes_kernels


class _OnCuda(Tensor):
    """A CPU tensor that says it is on CUDA."""

    is_cuda = True


def _pretended(x: Tensor) -> Tensor:
    return x.as_subclass(_OnCuda)


def test_kernels_are_for_cuda_tensors_of_their_dtypes_in_fused_mode() -> None:
    low = torch.zeros(1, dtype=torch.bfloat16)
    assert takes_kernels("fused", _pretended(low), None)
    assert not takes_kernels("plain", _pretended(low))
    assert not takes_kernels("fused", low)
    assert not takes_kernels("fused", _pretended(low), _pretended(low.double()))


def test_a_missing_triton_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "_has_triton", lambda: False)
    x = torch.zeros(1)
    assert not takes_kernels("fused", x)
    assert not takes_kernels("plain", _pretended(x))
    with pytest.raises(ConfigError, match=r"operators\.mode = 'plain'"):
        takes_kernels("fused", _pretended(x))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls that reach the compiled form."""
    calls: list[Any] = []
    compiled._say_once.cache_clear()

    def fake_compile(fn: Any, **options: Any) -> Any:
        assert options == {"dynamic": False}

        def run(*args: Any) -> Any:
            calls.append(args)
            return fn(*args)

        return run

    monkeypatch.setattr(torch, "compile", fake_compile)
    yield calls
    compiled._say_once.cache_clear()


def test_compiled_chains_are_for_cuda_in_fused_mode(compilations: list[Any]) -> None:
    double = compiled_on_cuda(lambda x, factor: x * factor)
    x = torch.ones(2)
    for args in (("fused", x, 2), ("plain", _pretended(x), 2)):
        assert double(*args).tolist() == [2, 2]
    assert compilations == []
    assert double("fused", _pretended(x), 2).tolist() == [2, 2]
    assert len(compilations) == 1


def test_shapes_past_the_limit_run_uncompiled_and_it_is_said(
    compilations: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    double = compiled_on_cuda(lambda x: x * 2)
    with caplog.at_level(logging.INFO, logger="megascale.ops.compiled"):
        for _again in range(2):
            for size in range(1, MOST_SHAPES + 3):
                assert double("fused", _pretended(torch.ones(size))).sum() == 2 * size
    assert len(compilations) == 2 * MOST_SHAPES
    assert len(caplog.records) == 1
    assert torch._dynamo.config.recompile_limit > MOST_SHAPES
