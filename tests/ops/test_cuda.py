"""The CUDA paths (compiled chains, cuDNN, FlexAttention, fp32 accumulation) against references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megascale.model.context import make_context
from megascale.ops.attention import attention, attention_reference
from megascale.ops.cross_entropy import cross_entropy, cross_entropy_reference
from megascale.ops.documents import make_documents
from megascale.ops.embedding import embedding
from megascale.ops.linear import linear
from megascale.ops.mode import OperatorMode
from megascale.ops.random import bits, dropout, fill_normal_, normal
from megascale.shards import Box
from tests.model.builders import build, random_tokens, tiny
from tests.ops.test_documents import packed

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def _error(got: Tensor, reference: Tensor) -> float:
    """Relative error in the 2-norm; NaN fails every comparison."""
    difference = (got.double() - reference.double()).norm()
    return (difference / reference.double().norm()).item()


def test_counters_give_the_same_bits_on_every_device() -> None:
    counters = torch.arange(10_000) * 7919 + 2**40
    assert torch.equal(bits(123, counters.cuda()).cpu(), bits(123, counters))
    torch.testing.assert_close(normal(123, counters.cuda()).cpu(), normal(123, counters))
    x, rows = torch.randn(64, 96), torch.arange(64) + 2**33
    assert torch.equal(dropout(x.cuda(), 0.3, 9, rows.cuda()).cpu(), dropout(x, 0.3, 9, rows))
    weight, box = torch.empty(300, 40, dtype=BF16), Box((5, 3), (300, 40))
    on_gpu = weight.cuda()
    fill_normal_(weight, 1, "w", box, (400, 50), 0.02)
    fill_normal_(on_gpu, 1, "w", box, (400, 50), 0.02)
    assert _error(on_gpu.cpu(), weight) < 1e-4


@pytest.mark.parametrize("window", [None, 100, 128, 1])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_len", [512, 200])
@pytest.mark.parametrize("mode", ["fused", "plain"])
def test_attention_and_gradients(
    window: int | None, kv_heads: int, seq_len: int, mode: OperatorMode
) -> None:
    shapes = [(2, seq_len, heads, 64) for heads in (4, kv_heads, kv_heads)]
    low = [torch.randn(s, device="cuda", dtype=BF16, requires_grad=True) for s in shapes]
    wide = [x.detach().double().requires_grad_() for x in low]
    weights = torch.randn(shapes[0], device="cuda", dtype=BF16)
    y = attention(*low, window=window, mode=mode)
    reference = attention_reference(*wide, window=window)
    assert _error(y, reference) < 1e-2
    grads = torch.autograd.grad(y, low, weights)
    for got, expected in zip(
        grads, torch.autograd.grad(reference, wide, weights.double()), strict=True
    ):
        if expected.norm() > 1e-6:  # with a window of 1 the scores have no gradient
            assert _error(got, expected) < 2e-2


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("window", [None, 100, 1])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("mode", ["fused", "plain"])
def test_attention_inside_documents(
    head_dim: int, kv_heads: int, window: int | None, dtype: torch.dtype, mode: OperatorMode
) -> None:
    """Other packings one after another: nothing may be kept of the one before."""
    seq_len, worst = 512, {BF16: (1e-2, 2e-2), torch.float32: (1e-4, 1e-4)}[dtype]
    for lengths in (((200, 1, 311), (512,)), ((1,) * 512, (37, 475)), ((512,), (512,))):
        starts = packed(lengths).starts_BS
        documents = make_documents(starts, lambda host: host.pin_memory().cuda(non_blocking=True))
        shapes = [(2, seq_len, heads, head_dim) for heads in (4, kv_heads, kv_heads)]
        low = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
        wide = [x.detach().double().requires_grad_() for x in low]
        weights = torch.randn(shapes[0], device="cuda", dtype=dtype)
        torch.cuda.set_sync_debug_mode("error")
        y = attention(*low, window=window, documents=documents, mode=mode)
        grads = torch.autograd.grad(y, low, weights)
        torch.cuda.set_sync_debug_mode("default")
        reference = attention_reference(*wide, window=window, documents=documents)
        assert _error(y, reference) < worst[0]
        for got, expected in zip(
            grads, torch.autograd.grad(reference, wide, weights.double()), strict=True
        ):
            if expected.norm() > 1e-6:  # documents of one token have no gradient of their scores
                assert _error(got, expected) < worst[1]


@pytest.mark.parametrize("num_valid", [None, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_cross_entropy(dtype: torch.dtype, num_valid: int | None) -> None:
    for tokens in (64, 96):
        logits = (torch.randn(tokens, 1024, device="cuda") * 4).to(dtype).requires_grad_()
        labels = torch.randint(0, 1000, (tokens,), device="cuda")
        mask = (torch.rand(tokens, device="cuda") > 0.2).float()
        reference = cross_entropy_reference(logits, labels, mask, num_valid)
        (expected,) = torch.autograd.grad(reference, logits)
        owned = logits * 1.0
        pointer = owned.data_ptr()
        loss = cross_entropy(owned, labels, mask, num_valid)
        (grad,) = torch.autograd.grad(loss, owned)
        assert _error(loss, reference) < 1e-5
        assert _error(grad, expected) < (1e-5 if dtype == torch.float32 else 5e-3)
        assert grad.data_ptr() == pointer


def test_embedding_gradient_repeats_bit_by_bit() -> None:
    tokens = torch.randint(0, 50, (4096,), device="cuda")  # every row many times
    grad = torch.randn(4096, 256, device="cuda", dtype=BF16)
    expected = torch.zeros(50, 256, device="cuda", dtype=torch.float64)
    expected.index_add_(0, tokens, grad.double())
    results = []
    for _ in range(5):
        weight = torch.randn(50, 256, device="cuda", dtype=BF16, requires_grad=True)
        weight.main_grad = torch.zeros(50, 256, device="cuda")  # type: ignore[attr-defined]
        embedding(tokens, weight).backward(grad)
        results.append(weight.main_grad)  # type: ignore[attr-defined]
    assert _error(results[0], expected) < 1e-5
    assert all(torch.equal(result, results[0]) for result in results)


def test_main_grad_accumulates_in_fp32() -> None:
    weight = torch.randn(256, 128, device="cuda", dtype=BF16, requires_grad=True)
    weight.main_grad = torch.zeros(256, 128, device="cuda")  # type: ignore[attr-defined]
    expected = torch.zeros(256, 128, device="cuda", dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(512, 128, device="cuda", dtype=BF16)
        grad = torch.randn(512, 256, device="cuda", dtype=BF16)
        linear(x, weight).backward(grad)
        expected += grad.double().t() @ x.double()
    assert _error(weight.main_grad, expected) < 1e-5  # type: ignore[attr-defined]
    assert weight.grad is None


@pytest.mark.parametrize(
    ("preset", "block"),
    [
        ("tiny-gpt", "serial"),
        ("tiny-gpt", "parallel"),
        ("tiny-qwen3", "serial"),
        ("tiny-mistral", "parallel"),
        ("tiny-llama", "serial"),
    ],
)
@pytest.mark.parametrize(
    ("recompute", "mode"),
    [("none", "fused"), ("selective", "fused"), ("full", "fused"), ("none", "plain")],
)
def test_model_equals_fp64_on_cpu_without_host_synchronisation(
    preset: str, block: str, recompute: str, mode: OperatorMode
) -> None:
    cfg = tiny(preset, block=block, hidden_dropout=0.1, head_dim=32)
    low = build(cfg, dtype=BF16)
    wide = build(cfg)
    wide.load_state_dict(low.state_dict())
    low.cuda()
    tokens = random_tokens(cfg, 2, 64)

    def loss(model: torch.nn.Module, device: str) -> Tensor:
        ids = tokens.to(device)
        numbers = torch.tensor([3, 8], device=device)
        ctx = make_context(
            2,
            64,
            device,
            sample_numbers_B=numbers,
            dropout_seed=4,
            recompute=recompute,  # type: ignore[arg-type]
            operators=mode,
        )
        mask = torch.ones(128, device=device)
        torch.cuda.set_sync_debug_mode("error" if check and device == "cuda" else "default")
        labels = ids.roll(-1, 1).flatten()
        y = cross_entropy(model(ids.flatten(), ctx), labels, mask, mode=mode)
        y.backward()
        torch.cuda.set_sync_debug_mode("default")
        return y

    check = False
    reference = loss(wide, "cpu")
    assert _error(loss(low, "cuda").cpu(), reference) < 5e-3
    for got, expected in zip(low.parameters(), wide.parameters(), strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        assert _error(got.grad.cpu(), expected.grad) < 5e-2
    check = True
    loss(low, "cuda")


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_fused_and_plain_operators_agree(block: str) -> None:
    cfg = tiny("tiny-gpt", block=block)
    tokens = random_tokens(cfg, 2, 64).cuda()

    def gradients(mode: OperatorMode) -> list[Tensor]:
        model = build(cfg, dtype=BF16).cuda()
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        ctx = make_context(2, 64, "cuda", operators=mode)
        mask = torch.ones(128, device="cuda")
        logits = model(tokens.flatten(), ctx)
        cross_entropy(logits, tokens.roll(-1, 1).flatten(), mask, mode=mode).backward()
        return [
            p.main_grad if p.grad is None else p.main_grad + p.grad  # type: ignore[attr-defined]
            for p in model.parameters()
        ]

    for got, expected in zip(gradients("fused"), gradients("plain"), strict=True):
        assert _error(got, expected) < 3e-2
