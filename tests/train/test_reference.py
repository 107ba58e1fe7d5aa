"""The reference is somebody else's: torch's FSDP and AdamW, and Hugging Face's transformers.

The first is given the same unsharded chunk and the same batches, and steps beside our program in
the same process group; the second reads what our program has trained, and is read by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megascale.checkpoint.saved_model import open_saved_model
from megascale.config import RunConfig, load_config
from megascale.data import GlobalBatch, MicroBatch
from megascale.model.context import make_context
from megascale.model.initialise import initialise, logical_tensors
from megascale.model.transformer import TransformerChunk
from megascale.ops.cross_entropy import cross_entropy
from megascale.train.assemble import assemble
from megascale.train.convert import export_to_hf
from megascale.train.run_folder import RunFolder
from megascale.train.step import train_step
from tests.distributed import run_ranks
from tests.model.builders import build, random_tokens
from tests.train.harness import TINY, make_loader, read
from tests.train.runs import curve, train

pytestmark = pytest.mark.full

NUM_STEPS = 3
FSDP_RTOL, FSDP_ATOL = 1e-10, 1e-11  # fp64; where a gradient is 0, Adam divides noise by eps
HF_TOLERANCE = 1e-5  # fp32


# ---------------------------------------------------------------- torch's fully sharded AdamW


@dataclasses.dataclass
class Step:
    """What both programs must agree on after a step."""

    loss: float
    norm: float
    parameters: dict[str, Tensor]  # by logical name, whole


FAMILIES = {
    "gpt": "model.norm=layernorm model.activation=gelu model.position=learned model.bias=all "
    "model.tie_embeddings=true model.vocab_size=250",
    "llama": "model.norm=rmsnorm model.activation=swiglu model.num_kv_heads=2 model.vocab_size=200",
}
SETTINGS = [
    "training.dtype=float64",
    "model.num_layers=3",
    "model.init_std=0.2",
    "optimizer.clip_grad=0.5",  # the norms are larger: every step is clipped
    "parallelism.bucket_mb=0.05",
]


def _batches(config: RunConfig, rank: int, world_size: int) -> Iterator[GlobalBatch]:
    """With masks that leave another number of tokens in every sample."""
    loader = make_loader(config, rank, world_size)
    return (read(config, loader, step, ragged=True) for step in range(NUM_STEPS))


def _whole_chunk(config: RunConfig) -> TransformerChunk:
    model = config.model
    chunk = TransformerChunk(
        model,
        range(model.num_layers),
        embed=True,
        head=True,
        num_positions=config.learned_positions,
        dtype=torch.float64,
    )
    initialise(chunk, model, config.training.seed)
    return chunk


def _their_steps(config: RunConfig, rank: int, world_size: int) -> list[Step]:
    model = _whole_chunk(config)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    cfg = config.optimizer
    weight_decay = {2: cfg.weight_decay, 1: 0.0}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() == dim], "weight_decay": decay}
            for dim, decay in weight_decay.items()
        ],
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.eps,
        fused=True,
    )
    steps = []
    for batch in _batches(config, rank, world_size):
        loss = _their_backward(model, batch.micro_batches, world_size)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad)
        assert isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(loss, norm.full_tensor().item(), _their_parameters(config, model)))
    return steps


def _their_backward(model: nn.Module, batches: tuple[MicroBatch, ...], world_size: int) -> float:
    """The mean loss over the unmasked tokens of all ranks; they average gradients over ranks."""
    sums = torch.tensor([0.0, sum(float(b.loss_mask_BS.sum()) for b in batches)])
    dist.all_reduce(sums)
    scale = world_size / sums[1].item()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        tokens_BS = torch.as_tensor(batch.tokens_BS).long()
        logits_TV = model(tokens_BS.flatten(), make_context(*tokens_BS.shape))
        labels_T = torch.as_tensor(batch.labels_BS).long().flatten()
        mask_T = torch.as_tensor(batch.loss_mask_BS).double().flatten()
        loss = cross_entropy(logits_TV, labels_T, mask_T) * scale
        loss.backward()
        total += loss.detach() / world_size
    dist.all_reduce(total)
    return total.item()


def _their_parameters(config: RunConfig, model: nn.Module) -> dict[str, Tensor]:
    whole = _whole_chunk(config)
    with torch.no_grad():
        for (name, target), (same, shard) in zip(
            whole.named_parameters(), model.named_parameters(), strict=True
        ):
            assert name == same
            assert isinstance(shard, DTensor)
            target.copy_(shard.full_tensor())
    return logical_tensors(whole)


def _our_steps(config: RunConfig, rank: int, world_size: int) -> list[Step]:
    assembly = assemble(config, config.mesh(world_size), torch.device("cpu"))
    steps = []
    for batch in _batches(config, rank, world_size):
        outcome = train_step(
            assembly, batch.micro_batches, global_batch=batch.num_samples, lr=config.optimizer.lr
        )
        loss, norm, *_ = outcome.summary.read()
        assembly.zero.wait_for_parameters()
        logical = logical_tensors(assembly.chunks[0])
        steps.append(Step(loss, norm, {name: v.clone() for name, v in logical.items()}))
    return steps


def _compare(rank: int, world_size: int, family: str) -> int:
    settings = [*TINY, *SETTINGS, *FAMILIES[family].split()]
    theirs = _their_steps(load_config(None, settings), rank, world_size)
    for zero_stage in (1, 2):
        config = load_config(None, [*settings, f"parallelism.zero_stage={zero_stage}"])
        ours = _our_steps(config, rank, world_size)
        for number, (got, expected) in enumerate(zip(ours, theirs, strict=True), start=1):
            assert expected.norm > config.optimizer.clip_grad
            _assert_equal(got, expected, f"ZeRO-{zero_stage}, step {number}")
    return len(theirs[0].parameters)


def _assert_equal(got: Step, expected: Step, where: str) -> None:
    assert got.parameters.keys() == expected.parameters.keys()
    torch.testing.assert_close(
        dataclasses.asdict(got),
        dataclasses.asdict(expected),
        rtol=FSDP_RTOL,
        atol=FSDP_ATOL,
        msg=lambda text: f"{where}: {text}",
    )


@pytest.mark.parametrize(("num_ranks", "family"), [(2, "gpt"), (4, "llama")])
def test_three_steps_equal_torch_s_fully_sharded_adamw(num_ranks: int, family: str) -> None:
    """ZeRO-1 and ZeRO-2: losses, gradient norms, and all parameters after each step."""
    compared = run_ranks(_compare, num_ranks, family)
    assert set(compared) == {52 if family == "gpt" else 30}


# ---------------------------------------------------------------- transformers

OPTIONS = [
    "model.num_layers=4",
    "model.init_std=0.08",
    "lr_scheduler.decay_type=constant",
    "training.micro_batch_size=2",
]
TRAINED = {
    "llama": ["model.preset=tiny-llama", "model.vocab_size=100"],  # padded on two tensor ranks
    "mistral": ["model.preset=tiny-mistral", "model.attention_window=5"],
    "qwen2": ["model.preset=tiny-qwen2"],
}


@pytest.mark.parametrize("family", TRAINED)
def test_what_pipeline_and_tensor_ranks_have_trained_is_theirs(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    options = [*OPTIONS, *TRAINED[family], "training.steps=3"]
    assert train(tmp_path / "run", {"tp": 2, "dp": 1, "pp": 2}, options) == [None] * 4
    export_to_hf(tmp_path / "run", tmp_path / "hf", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    ).eval()
    assert theirs.config.model_type == family
    saved = open_saved_model(tmp_path / "run")
    model = build(saved.model, saved.num_positions, torch.float32)
    for name, values in logical_tensors(model).items():
        values.copy_(saved.parameter(name))
    tokens_BS = random_tokens(saved.model, 2, 16)
    with torch.no_grad():
        logits = model(tokens_BS.flatten(), make_context(2, 16)).view(2, 16, -1)
        torch.testing.assert_close(
            logits, theirs(tokens_BS).logits, rtol=HF_TOLERANCE, atol=HF_TOLERANCE
        )
    initial = logical_tensors(_whole_chunk(RunFolder(tmp_path / "run").load_config()))
    for name in ("embed.tokens.weight", "layers.3.mlp.fc2.weight"):
        assert (saved.parameter(name) - initial[name]).abs().max() > 0.01, name


STARTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    # The second tensor rank holds no real row of 60 tokens, only padding.
    "llama": ({"vocab_size": 60, "rms_norm_eps": 1e-5}, ["model.vocab_size=60"]),
    "qwen2": ({"vocab_size": 256, "tie_word_embeddings": True}, ["model.preset=tiny-qwen2"]),
}


@pytest.mark.parametrize("family", STARTED)
def test_training_starts_with_their_loss(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    their_options, options = STARTED[family]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(
            family,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            **their_options,
        )
    ).eval()
    theirs.save_pretrained(tmp_path / "hf")
    options = [
        *OPTIONS,
        "model.num_kv_heads=2",
        *options,
        "training.steps=1",
        f"checkpoint.initial_load_path={tmp_path / 'hf'}",
        "checkpoint.initial_load_in_hf=true",
    ]
    assert train(tmp_path / "run", {"tp": 2, "dp": 2, "pp": 1}, options) == [None] * 4
    loss, _ = curve(tmp_path / "run")[1]

    config = load_config(None, [*TINY, *options])
    batch = read(config, make_loader(config, 0, 1), 0, ragged=False)
    tokens_BS, labels_BS = (
        torch.cat([torch.as_tensor(getattr(m, name)).long() for m in batch.micro_batches])
        for name in ("tokens_BS", "labels_BS")
    )
    assert torch.equal(tokens_BS[:, 1:], labels_BS[:, :-1])
    whole_BS = torch.cat([tokens_BS, labels_BS[:, -1:]], dim=1)
    with torch.no_grad():
        expected = theirs(input_ids=whole_BS, labels=whole_BS).loss.item()
    assert loss == pytest.approx(expected, rel=HF_TOLERANCE)
