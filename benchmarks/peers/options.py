"""What both peers are told on the command line, and the shapes that they know by name.

A shape is a preset of megascale, so that nobody writes a width twice. TorchTitan has one block
(RMSNorm, SwiGLU, rotary positions, no bias): `llama_block` is its nearest shape of any model.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megascale.config import ModelConfig
from megascale.config.presets import PRESETS, nearest_preset
from megascale.env import rank_environment
from megascale.errors import ConfigError

# name in the rows of `step`: preset, and what differs from it
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt3-175b-4l": ("bench-175b-4l", {}),
    "gpt3-175b-4l-128h": ("bench-175b-4l", {"num_heads": 128}),
    "gpt3-175b-8l": ("bench-175b-8l", {}),
    "7b": ("bench-7b", {}),
}
FIX = (
    "run `make peers-wheels` where there is network and install .peers/*.whl here "
    "(benchmarks/peers/README.md)"
)


@dataclass(frozen=True)
class Options:
    """A run of a peer: the shape, the layout, the batch. Sizes of batches are in sequences."""

    name: str
    model: ModelConfig
    tp: int
    pp: int
    vp: int
    dp: int
    mbs: int
    gbs: int
    seq: int
    steps: int
    seed: int
    device: str

    @property
    def num_micro_batches(self) -> int:
        """Of each data-parallel rank."""
        return self.gbs // (self.mbs * self.dp)


def shape(name: str) -> ModelConfig:
    """The model of a name: one of `SHAPES`, else a preset. Raises ConfigError for neither."""
    preset, changes = SHAPES.get(name, (name, {}))
    if preset not in PRESETS:
        raise ConfigError(
            f"--model is {name!r}; {nearest_preset(name)}; also legal: {', '.join(SHAPES)}"
        )
    return ModelConfig(preset=preset, **changes)


def llama_block(model: ModelConfig) -> ModelConfig:
    """The shape that TorchTitan's Llama block gives to `model`.

    An ungated MLP of width 4h becomes a gated one of width 8h/3, rounded up to a multiple of 256 as
    Llama does: equal FLOPs where 3 divides 8h, else up to 1 % more, which are then counted.
    """
    ffn = model.ffn_size
    if not model.gated:
        ffn = 256 * -(-(2 * ffn // 3) // 256)
    return ModelConfig(
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=model.vocab,
        norm="rmsnorm",
        norm_eps=model.norm_eps,
        activation="swiglu",
        position="rope",
        rope_theta=model.rope_theta,
        bias="none",
        tie_embeddings=False,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of both peers."""
    parser.add_argument("--model", required=True, help="a name of SHAPES or a preset of megascale")
    for name, default in (("tp", 1), ("pp", 1), ("vp", 1), ("mbs", 1), ("gbs", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seq", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def read_options(parsed: argparse.Namespace, world_size: int | None = None) -> Options:
    """The options, checked; `dp` is what tp and pp leave of the ranks. Raises ConfigError."""
    ranks = rank_environment().world_size if world_size is None else world_size
    for name in ("tp", "pp", "vp", "mbs", "gbs", "seq"):
        if getattr(parsed, name) < 1:
            raise ConfigError(f"--{name} is {getattr(parsed, name)}; give 1 or more")
    if ranks % (parsed.tp * parsed.pp):
        raise ConfigError(
            f"{ranks} rank(s) are not a multiple of --tp {parsed.tp} x --pp {parsed.pp}; start "
            f"another number (--nproc_per_node) or change the layout"
        )
    options = Options(
        name=parsed.model,
        model=shape(parsed.model),
        tp=parsed.tp,
        pp=parsed.pp,
        vp=parsed.vp,
        dp=ranks // (parsed.tp * parsed.pp),
        mbs=parsed.mbs,
        gbs=parsed.gbs,
        seq=parsed.seq,
        steps=parsed.steps,
        seed=parsed.seed,
        device=parsed.device,
    )
    _check(options)
    return options


def _check(options: Options) -> None:
    micro = options.mbs * options.dp
    chunks = options.pp * options.vp
    if options.gbs % micro:
        raise ConfigError(
            f"--gbs {options.gbs} is not a multiple of --mbs {options.mbs} x {options.dp} "
            f"data-parallel ranks; a multiple of {micro} is legal"
        )
    if options.vp > 1 and options.pp == 1:
        raise ConfigError(
            f"--vp is {options.vp} without a pipeline; give --pp 2 or more, or --vp 1"
        )
    if options.model.num_layers % chunks:
        raise ConfigError(
            f"{options.name} has {options.model.num_layers} layers, which {chunks} chunks (--pp "
            f"{options.pp} x --vp {options.vp}) do not divide"
        )
    if options.pp > 1 and options.num_micro_batches % options.pp:
        raise ConfigError(
            f"{options.num_micro_batches} micro-batches a step are not a multiple of --pp "
            f"{options.pp}, which the interleaved schedule needs; change --gbs or --mbs"
        )
    if options.steps < 5:
        raise ConfigError(
            f"--steps is {options.steps}; the first 3 and the last are left out, so give 5 or more"
        )


def missing(modules: Sequence[str]) -> list[str]:
    """Those of `modules` that are not installed here: top-level names, none of which runs."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def require(peer: str, modules: Sequence[str]) -> None:
    """Raises ConfigError with how to get the peer where one of its modules is absent."""
    absent = missing(modules)
    if absent:
        raise ConfigError(f"{peer} cannot run here, {', '.join(absent)} not installed: {FIX}")
