"""The life of one rank: device, process group, recorder, assembly, loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megascale.config import RunConfig
from megascale.env import RankEnvironment, agent_environment, switch_multicast_off
from megascale.errors import ConfigError, LaunchError
from megascale.parallel.spans import no_span
from megascale.parallel.world import initialise_world, leave_world
from megascale.telemetry.hooks import Hook
from megascale.telemetry.recorder import Recorder
from megascale.topology import Mesh
from megascale.train.agreement import check_agreement
from megascale.train.assemble import Assembly, assemble
from megascale.train.auto_layout import agree_on_layout, is_open
from megascale.train.loop import Loop
from megascale.train.memory_reports import MemoryReports
from megascale.train.recording import open_recorder
from megascale.train.run_folder import RunFolder
from megascale.train.waterfall.probe import Probe, attach


@dataclass(frozen=True)
class Ready:
    """A rank that is built and has not begun to train; `probe` where operators are marked."""

    assembly: Assembly
    recorder: Recorder
    probe: Probe | None


Around = Callable[[Ready], AbstractContextManager[object]]


def run_rank(
    config: RunConfig,
    rank: RankEnvironment,
    *,
    resume: bool,
    hooks: Sequence[Hook] = (),
    around: Around = nullcontext,
) -> None:
    """Join the world, build, load, train, save. Returns when the run is done or told to stop.

    around  entered when the rank is built and left after its loop: what a bench does beside it
    """
    if not is_open(config):
        config.mesh(rank.world_size)  # refused before anybody is waited for
    device = pick_device(config, rank)
    folder = RunFolder(config.job.run_dir)
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    if rank.world_size > 1:
        host, port = rank.rendezvous
        initialise_world(
            config.comm,
            rank=rank.global_rank,
            world_size=rank.world_size,
            device=device,
            init_method=f"tcp://{host}:{port}",
            start=rank.start,
        )
        if is_open(config):
            config = agree_on_layout(config, rank, resume=resume)
        check_agreement(config)
    mesh = config.mesh(rank.world_size)
    failed = True
    try:
        with open_recorder(config, rank, mesh, device, folder, hooks) as recorder:
            try:
                probe = Probe(recorder) if config.telemetry.waterfall else None
                with recorder.span("init", host=True):
                    span = recorder.span if probe is None else probe.span
                    detail = no_span if probe is None else probe.span
                    assembly = assemble(config, mesh, device, span=span, detail=detail)
                if assembly.groups.creation_s:
                    recorder.incident("groups", creation_s=assembly.groups.creation_s)
                if probe is not None:
                    recorder.incident("waterfall", gemm_flops=attach(probe, assembly))
                every = config.telemetry.memory_interval
                if config.telemetry.enable and every:
                    recorder.hooks.append(MemoryReports(recorder, device, every))
                agent = agent_environment()
                if agent.fault_orders is not None:  # by chaos and tests only
                    from megascale.train.faults import ordered

                    recorder.hooks.extend(
                        ordered(agent.fault_orders, assembly, rank.global_rank, agent.epoch)
                    )
                with around(Ready(assembly, recorder, probe)):
                    Loop(assembly, folder, recorder).run(resume=resume)
            except RuntimeError as error:
                if rank.world_size > 1 and _is_of_peers(error):
                    raise _explained(error, recorder, rank, mesh) from error
                raise
        failed = False
    finally:
        # NCCL's would first wait for what is pending: for peers that wait for this rank. What is
        # left to the end of the process is aborted there, as soon as the error has been told.
        if not (failed and device.type == "cuda"):
            leave_world()


def _explained(
    error: RuntimeError, recorder: Recorder, rank: RankEnvironment, mesh: Mesh
) -> LaunchError:
    """A collective that failed or passed its deadline, told with its place."""
    place = mesh.coordinates(rank.global_rank)
    return LaunchError(
        f"rank {rank.global_rank} of {rank.world_size} (tensor {place.tp_rank}, data "
        f"{place.dp_rank}, pipeline {place.pp_rank}) failed in {recorder.failed_in}: {error}; a "
        "peer died, is stuck or slow: compare the ranks' logs (RUN/logs) and their last events "
        "(RUN/telemetry). The deadline is comm.timeout_s"
    )


def _is_of_peers(error: RuntimeError) -> bool:
    """gloo raises plain RuntimeErrors; these words are in those that peers cause."""
    words = ("timed out", "connection", "peer", "socket")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def pick_device(config: RunConfig, rank: RankEnvironment) -> torch.device:
    """The CUDA device of this local rank where there is one or it was asked for, else the CPU."""
    wanted = config.training.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    switch_multicast_off()  # whoever started this rank; no kernel of ours uses it
    num_devices = torch.cuda.device_count()
    if rank.local_rank >= num_devices:
        raise ConfigError(
            f"local rank {rank.local_rank} has no CUDA device, {num_devices} are visible; "
            + (f"start at most {num_devices} ranks on this machine, or " if num_devices else "")
            + "set training.device = 'cpu'"
        )
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    return device
