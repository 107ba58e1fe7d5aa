"""The host in the step: it waits for no device. On GPUs; torch itself raises where it would. And
whose clock times it."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from megascale.config import load_config
from megascale.train.assemble import assemble
from megascale.train.corpus import make_loader
from megascale.train.host import Moment
from megascale.train.step import train_step
from tests.distributed import run_ranks

BF16 = [
    *("model.hidden_size=256", "model.num_layers=4", "model.num_heads=4", "model.vocab_size=512"),
    *("model.ffn_hidden_size=512", "training.seq_len=128", "training.global_batch_size=4"),
    *("data.synthetic=true", "training.device=cuda", "training.dtype=bfloat16"),
]
GPT = [
    *("model.norm=layernorm", "model.activation=gelu_tanh", "model.position=learned"),
    "model.bias=all",
]
TP2 = "parallelism.tensor_parallel_size=2"
PP2 = "parallelism.pipeline_parallel_size=2"
VP2 = "parallelism.virtual_pipeline_size=2"
LAYOUTS = {
    "tp2": [TP2],
    "tp2-parallel-window": [TP2, "model.block=parallel", "model.attention_window=48"],
    "dp2": [],
    "dp2-zero2": ["parallelism.zero_stage=2"],
    "dp2-bf16": ["parallelism.grad_reduce_dtype=bfloat16"],
    "pp2-vp2": [PP2, VP2],
    "pp2-vp2-zb": [PP2, VP2, "parallelism.pipeline_schedule=interleaved_zb"],
    "pp2-vp2-shared": [PP2, VP2, "parallelism.share_head=true"],
    "tp2-joined": [TP2, "parallelism.join_weight_gradients=2"],
    "lamb": ["optimizer.name=lamb"],
}


def _steps_that_may_not_wait(rank: int, world_size: int, settings: list[str]) -> int:
    """Three steps to compile, tune and allocate; then two in which a wait is an error."""
    config = load_config(None, [*BF16, *settings])
    mesh, device = config.mesh(world_size), torch.device("cuda", rank)
    assembly = assemble(config, mesh, device)
    loader = make_loader(config, mesh, assembly.groups.coordinates, 0)
    outcomes = []
    for number in range(5):
        batch = next(loader)
        if number == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes.append(
                train_step(assembly, batch.micro_batches, global_batch=batch.num_samples, lr=1e-3)
            )
        finally:
            if number == 4:
                torch.cuda.set_sync_debug_mode("default")
    loader.close()
    assert all(outcome.summary.read()[2] == 0 for outcome in outcomes), "no step was masked"
    return len(outcomes)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [[], GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("mode", ["fused", "plain"])
def test_a_step_on_one_gpu_waits_for_nothing(family: list[str], mode: str) -> None:
    settings = [*family, f"operators.mode={mode}"]
    arguments = (_steps_that_may_not_wait, 1, settings)
    assert run_ranks(*arguments, timeout_s=280, cuda=True) == [5]


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_on_two_gpus_waits_for_nothing(layout: str) -> None:
    arguments = (_steps_that_may_not_wait, 2, LAYOUTS[layout])
    assert run_ranks(*arguments, timeout_s=280, cuda=True) == [5, 5]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_wait_in_a_step_would_be_an_error() -> None:
    """What the tests above rest on."""
    x = torch.ones(8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_moment_is_the_devices() -> None:
    """A host that ran ahead and then waited: it is the device's time that counts, and the last
    step of a run is no shorter."""
    device = torch.device("cuda")
    moments = [Moment(device)]
    for _ in range(3):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        moments.append(Moment(device))
    launched = time.monotonic()
    moments[-1].wait()
    assert time.monotonic() - launched > 0.15, "the host was ahead"
    first, *others = (b.seconds_since(a) for a, b in pairwise(moments))
    assert first > 0.05
    assert all(seconds == pytest.approx(first, rel=0.2) for seconds in others)


def test_a_moment_of_a_cpu_is_now() -> None:
    first = Moment(torch.device("cpu"))
    time.sleep(0.02)
    second = Moment(torch.device("cpu"))
    second.wait()
    assert 0.02 <= second.seconds_since(first) < 1.0
