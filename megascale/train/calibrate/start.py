"""Behind `megascale calibrate`: checks, starts a rank a device, writes the file.

Every rank measures its own device at the same time, as in a training step, and rank 0's samples are
written; collectives are the slowest rank's. One node is measured: a network between nodes stays
what the device's catalogue file says, and says so.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from megascale.env import rank_environment, switch_multicast_off
from megascale.errors import ConfigError
from megascale.plan.machine.write import write_cluster
from megascale.train.calibrate.grid import FULL, QUICK
from megascale.train.calibrate.rank import Budget, join, measure
from megascale.train.launch import launch_local


def start_calibration(output: Path, *, nproc: int | None, quick: bool, budget_s: float) -> str:
    """Measure, write `output`, and say what is in it. Raises ConfigError before anything starts."""
    _check(output, nproc)
    place = rank_environment()
    nproc = nproc or torch.cuda.device_count()
    if nproc > 1 and place.world_size == 1:
        arguments = ["calibrate", str(output), "--nproc", str(nproc), "--budget-s", str(budget_s)]
        with tempfile.TemporaryDirectory(prefix="calibrate-") as logs:
            launch_local([*arguments, *(["--quick"] if quick else [])], nproc, Path(logs), None)
        return ""
    switch_multicast_off()
    group, device = join(place)
    is_first = place.global_rank == 0
    try:
        samples = measure(
            QUICK if quick else FULL,
            Budget(budget_s, group, device),
            lambda text: print(text, file=sys.stderr, flush=True) if is_first else None,
        )
    finally:
        if group is not None:
            dist.destroy_process_group()
    if not is_first:
        return ""
    properties = torch.cuda.get_device_properties(device)
    kept = output.with_suffix(".samples.json")  # what was measured outlives a fit that fails
    kept.write_text(samples.model_dump_json())
    write_cluster(
        output,
        samples,
        place.world_size,
        place.world_size,
        num_sms=properties.multi_processor_count,
        memory_gb=properties.total_memory / 2**30,
    )
    kept.unlink()
    return (
        f"{output}: {samples.device}, {len(samples.gemm)} products, {len(samples.attention)} "
        f"attention cores, {len(samples.memory)} passes, {len(samples.collective)} transfers; "
        f"products keep {samples.sustained:.1%} of their rate for seconds on end\n"
        f"plan with it: megascale plan RECIPE --cluster {output}"
    )


def _check(output: Path, nproc: int | None) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ConfigError(
            "calibrate measures GPUs and this machine shows none; run it on a node of the cluster, "
            "or plan with a file that is there: h200, h100, a100, paper"
        )
    if nproc is not None and nproc > num_gpus:
        raise ConfigError(f"--nproc is {nproc}, but there are {num_gpus} GPUs; use 1 to {num_gpus}")
    if output.suffix != ".toml":
        raise ConfigError(f"{output} is to be a cluster file; name it NAME.toml")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ConfigError(f"{output} cannot be written; name a file in a folder that exists")
