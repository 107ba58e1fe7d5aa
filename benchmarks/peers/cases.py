"""The cases of the comparison, the peers in their variants, and the command line of each in each.

A case is a recipe of megascale with overrides. A peer gets its shape, layout and batch from the
same checked configuration (`peer_command`), so nothing can be given to one of them alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import megatron, titan
from benchmarks.peers.options import shape
from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.train.bench.case import Case, make_case

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OURS = "megascale"


@dataclass(frozen=True)
class Peer:
    """A peer in a variant.

    program    module under torchrun, with `flags` of its own
    baseline   its name among the baselines of a row of `step`
    recompute  of activations, as the row of `peers` says it
    modules    what must be importable
    variables  environment of its processes
    fallbacks  further flags, tried in order where the run before was out of memory
    start_s    what a run costs before its steps: start, compilation (an estimate)
    """

    program: str
    baseline: str
    title: str
    modules: tuple[str, ...]
    variables: Mapping[str, str]
    start_s: float
    flags: tuple[str, ...] = ()
    recompute: str = "none"
    fallbacks: tuple[tuple[str, ...], ...] = ()


def _megatron(baseline: str, *flags: str) -> Peer:
    return Peer(
        "benchmarks.peers.megatron",
        baseline,
        megatron.TITLE,
        megatron.MODULES,
        megatron.VARIABLES,
        start_s=30.0,
        flags=flags,
        fallbacks=(("--recompute-layers", "4"), ("--recompute-layers", "12")),
    )


def _titan(baseline: str, recompute: str, *flags: str) -> Peer:
    return Peer(
        "benchmarks.peers.titan",
        baseline,
        titan.TITLE,
        titan.MODULES,
        titan.VARIABLES,
        start_s=45.0,
        flags=("--recompute", recompute, *flags),
        recompute=recompute,
    )


PEERS = {
    "megatron": _megatron("megatron_core"),
    "megatron-fused": _megatron("megatron_core_fused", "--fused-wgrad"),
    "titan": _titan("torchtitan", "selective"),
    "titan-none": _titan("torchtitan_none", "none"),
    "titan-never": _titan("torchtitan_never", "none", "--reshard", "never"),
}
DEFAULT_SYSTEMS = (OURS, "megatron", "titan", "titan-none")


@dataclass(frozen=True)
class Setup:
    """A line of the table; `step_s` is about what a step takes, for the budget alone.

    overrides    of the recipe: shape, layout and batch, which the peers get too, and switches of
                 megascale's own, with which it is fastest there (docs/log.md)
    target       the least MFU that megascale should reach
    over_better  or how many times that of the better peer
    """

    recipe: str
    model: str
    overrides: tuple[str, ...]
    step_s: float
    steps: int = 8
    num_ranks: int = 2
    target: float | None = None
    over_better: float | None = None


def _sets(**values: object) -> tuple[str, ...]:
    """Overrides by the short names of the rows."""
    keys = {
        "tp": "parallelism.tensor_parallel_size",
        "pp": "parallelism.pipeline_parallel_size",
        "vp": "parallelism.virtual_pipeline_size",
        "mbs": "training.micro_batch_size",
        "gbs": "training.global_batch_size",
        "seq": "training.seq_len",
        "heads": "model.num_heads",
        "preset": "model.preset",
        "schedule": "parallelism.pipeline_schedule",
        "share_head": "parallelism.share_head",
        "join": "parallelism.join_weight_gradients",
    }
    return tuple(f"{keys[name]}={value}" for name, value in values.items())


_WIDE, _7B = "bench-175b-4l.toml", "bench-7b.toml"
_LLAMA = {"preset": "llama3-8b", "mbs": 1, "gbs": 16, "seq": 8192}
CASES = {
    "175b-tp2-mbs1": Setup(_WIDE, "gpt3-175b-4l", _sets(tp=2, mbs=1, gbs=16), 1.7, target=0.59),
    "175b-tp2-mbs4": Setup(
        _WIDE, "gpt3-175b-4l", _sets(tp=2, mbs=4, gbs=64, join=1), 5.7, steps=6, target=0.635
    ),
    "175b-128h-tp2-mbs4": Setup(
        _WIDE,
        "gpt3-175b-4l-128h",
        _sets(heads=128, tp=2, mbs=4, gbs=64, join=1),
        5.8,
        steps=6,
        target=0.63,
    ),
    "175b-pp2-mbs1": Setup(
        _WIDE,
        "gpt3-175b-4l",
        (
            *_sets(tp=1, pp=2, vp=2, mbs=1, gbs=16),
            *_sets(schedule="interleaved_zb", share_head="true", join=1),
        ),
        1.8,
        target=0.52,
    ),
    "7b-dp2": Setup(_7B, "7b", _sets(mbs=2, gbs=32), 2.7, target=0.585),
    "llama3-8b-dp2": Setup(_7B, "llama3-8b", _sets(**_LLAMA), 8.0, steps=6, over_better=1.15),
    "llama3-8b-tp2": Setup(_7B, "llama3-8b", _sets(tp=2, **_LLAMA), 8.0, steps=6, over_better=1.15),
}


def checked_case(setup: Setup, *, steps: int | None, more: Sequence[str], num_gpus: int) -> Case:
    """The case as megascale runs it. Raises ConfigError where the peers would run another shape.

    more  overrides of the user, for megascale: a switch of its own, never the shape
    """
    overrides = (*setup.overrides, f"training.steps={steps or setup.steps}", *more)
    recipe = RECIPES / setup.recipe
    case = make_case(recipe, overrides, setup.num_ranks, model=setup.model, num_gpus=num_gpus)
    ours, theirs = (_essence(model) for model in (case.config.model, shape(setup.model)))
    if ours != theirs:
        differing = [key for key in ours if ours[key] != theirs[key]]
        raise ConfigError(
            f"{setup.model} would be another model for the peers ({', '.join(differing)}); change "
            "only what is no shape, or add a shape to SHAPES in benchmarks/peers/options.py"
        )
    return case


def _essence(model: ModelConfig) -> dict[str, object]:
    """What costs time: the shape, without names and algorithms that megascale alone has."""
    ours_alone = {"preset", "max_seq_len", "block", "attention_window", "init_std"}
    return {**model.model_dump(exclude=ours_alone), "ffn": model.ffn_size, "kv": model.kv_heads}


def peer_command(peer: Peer, case: Case, port: int, more: Sequence[str] = ()) -> list[str]:
    """The program of a peer in the case, as ranks of this machine."""
    config, keys = case.config, case.keys
    options = {name: keys[name] for name in ("tp", "pp", "vp", "mbs", "gbs", "seq")}
    options |= {"steps": config.training.steps, "seed": config.training.seed}
    device = "cpu" if config.training.device == "cpu" else "cuda"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(case.num_ranks)]
    return [
        sys.executable,
        *launcher,
        *("--master_addr", "127.0.0.1", "--master_port", str(port)),
        *("-m", peer.program, "--model", case.model, "--device", device),
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        *peer.flags,
        *more,
    ]


def our_command(case: Case) -> list[str]:
    """What `run_case` does, as a user would type it."""
    flags = [part for override in case.overrides for part in ("--set", override)]
    return ["megascale", "train", str(case.recipe), "--nproc", str(case.num_ranks), *flags]
