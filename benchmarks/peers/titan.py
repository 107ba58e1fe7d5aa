"""Train a few steps with TorchTitan 0.2.2 and print one line of JSON (`result.py`).

    python -m torch.distributed.run --nproc_per_node 2 -m benchmarks.peers.titan \
        --model gpt3-175b-4l --tp 2 --mbs 1 --gbs 16 --recompute none

TorchTitan's own trainer runs, with its Llama block in the model's width (`options.llama_block`), a
loader of random tokens, and every option on its own command line. Without FSDP it has no mixed
precision: with tensor or pipeline parallelism alone parameters, gradients and optimizer state are
bf16, without fp32 master weights, which is less work and memory than the others do.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.clock import over_ranks
from benchmarks.peers.options import Options, add_options, llama_block, read_options, require
from benchmarks.peers.result import (
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_CODE,
    Result,
    as_line,
    expected_titan_loss,
    failure_line,
)
from megascale.env import switch_multicast_off
from megascale.errors import MegascaleError

SYSTEM = "torchtitan"
SPEC = "peer"  # our shape and loader by this name in its registry
TITLE = "TorchTitan 0.2.2"
MODULES = (
    "torchtitan",
    "torchdata",
    "tyro",
    "docstring_parser",
    "typeguard",
    "datasets",
    "dill",
    "multiprocess",
    "einops",
    "pyarrow",
)
# As its launcher and its documents set them.
VARIABLES = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 2 for what cannot run, 3 where the device's memory is too small."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.titan")
    add_options(parser)
    parser.add_argument("--recompute", choices=("none", "selective"), default="selective")
    parser.add_argument("--reshard", choices=("default", "never"), default="default")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-compile-loss", action="store_true", help="blocks alone are compiled")
    parser.add_argument("--no-async-tp", action="store_true")
    parsed = parser.parse_args(arguments)
    try:
        options = read_options(parsed)
        require(TITLE, MODULES)
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return 2
    os.environ.update(VARIABLES)
    switch_multicast_off()
    try:
        result = run(options, parsed)
    except torch.OutOfMemoryError as error:
        print(failure_line(SYSTEM, OUT_OF_MEMORY), error, sep="\n", flush=True)
        return OUT_OF_MEMORY_CODE
    if result is not None:
        print(as_line(result), flush=True)
    return 0


def run(options: Options, choices: argparse.Namespace) -> Result | None:
    """Train; the result on rank 0."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    from benchmarks.peers.titan_train import PeerTrainer, register

    init_logger()
    shape = llama_block(options.model)
    register(options, shape)
    with tempfile.TemporaryDirectory(prefix="peers-titan-") as folder:
        trainer = PeerTrainer(ConfigManager().parse_args(command_line(options, choices, folder)))
        trainer.train()
        figures = over_ranks(trainer.clock, trainer.losses, trainer.device)
    result = Result(
        system=SYSTEM,
        version=version("torchtitan"),
        model=options.name,
        expected_loss=expected_titan_loss(shape),
        settings={
            "attention": "cudnn first, as it orders them",
            "block": f"Llama, ffn {shape.ffn_size}",
            "recompute": choices.recompute,
            "compile": _compiled(choices),
            "async_tp": _async_tp(options, choices),
            "parameters": "float32, bf16 compute" if options.dp > 1 else "bfloat16, no master",
            "gradients": "float32" if options.dp > 1 else "bfloat16",
            "reshard_after_forward": choices.reshard if options.dp > 1 else None,
            "optimizer": "torch AdamW, fused",
        },
        **figures,
    )
    is_first = dist.get_rank() == 0
    trainer.close()
    dist.destroy_process_group()
    return result if is_first else None


def _compiled(choices: argparse.Namespace) -> str:
    if choices.no_compile:
        return "nothing"
    return "model" if choices.no_compile_loss else "model,loss"


def _async_tp(options: Options, choices: argparse.Namespace) -> bool:
    """It is made by the compiler's passes."""
    return options.tp > 1 and not choices.no_async_tp and not choices.no_compile


def command_line(options: Options, choices: argparse.Namespace, folder: str) -> list[str]:
    """TorchTitan's own arguments for this run."""
    pipelined = options.pp > 1
    # A pipeline takes the batch of a rank at once and cuts it itself.
    local_batch = options.gbs // options.dp if pipelined else options.mbs
    wanted: dict[str, Any] = {
        "job.dump_folder": folder,
        "model.name": SPEC,
        "model.flavor": SPEC,
        "training.steps": options.steps,
        "training.seq_len": options.seq,
        "training.local_batch_size": local_batch,
        "training.global_batch_size": options.gbs,
        "training.dtype": "float32" if options.dp > 1 else "bfloat16",
        "parallelism.data_parallel_shard_degree": options.dp,
        "parallelism.fsdp_reshard_after_forward": choices.reshard,
        "parallelism.tensor_parallel_degree": options.tp,
        "parallelism.pipeline_parallel_degree": options.pp,
        "activation_checkpoint.mode": choices.recompute,
        "optimizer.lr": 3e-4,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": options.steps,  # of the first and the last step: others do not wait
        "comm.trace_buf_size": 0,
        "debug.seed": options.seed,
    }
    if pipelined:
        wanted |= {
            "parallelism.pipeline_parallel_schedule": (
                "Interleaved1F1B" if options.vp > 1 else "1F1B"
            ),
            "parallelism.pipeline_parallel_microbatch_size": options.mbs,
            "parallelism.pipeline_parallel_layers_per_stage": (
                options.model.num_layers // (options.pp * options.vp)
            ),
            "parallelism.pipeline_parallel_first_stage_less_layers": 0,
            "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        }
    arguments = [part for key, value in wanted.items() for part in (f"--{key}", str(value))]
    if not choices.no_compile:
        arguments += ["--compile.enable", "--compile.components", _compiled(choices)]
    if _async_tp(options, choices):
        arguments.append("--parallelism.enable_async_tensor_parallel")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
