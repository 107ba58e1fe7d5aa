"""Opens what a rank records: the clock of its device, its line file, and the recorder over both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from megascale.config import RunConfig
from megascale.env import RankEnvironment, agent_environment, hostname, installed_versions
from megascale.events import ProgressWriter, run_header
from megascale.parallel.clock import CudaEventClock
from megascale.telemetry.clock import Clock, MonotonicClock
from megascale.telemetry.deadline import Deadline
from megascale.telemetry.garbage import GarbagePauses
from megascale.telemetry.hooks import Hook
from megascale.telemetry.monitor.asked import MonitorRequests
from megascale.telemetry.prometheus import start_endpoint
from megascale.telemetry.recorder import NullRecorder, Recorder
from megascale.telemetry.writer import LineWriter, line_file
from megascale.topology import Mesh
from megascale.train.out_of_memory import snapshot_on_oom
from megascale.train.profile_requests import ProfileRequests
from megascale.train.profilers import profilers
from megascale.train.run_folder import RunFolder

_ENDPOINT_S = 5.0  # for a process that was killed to be gone


@contextmanager
def open_recorder(
    config: RunConfig,
    rank: RankEnvironment,
    mesh: Mesh,
    device: torch.device,
    folder: RunFolder,
    hooks: Sequence[Hook],
) -> Iterator[Recorder]:
    """This rank's recorder, writing to its line file until the context ends."""
    telemetry, agent = config.telemetry, agent_environment()
    if not telemetry.enable:
        yield NullRecorder(hooks)
        return
    clock: Clock = CudaEventClock() if device.type == "cuda" else MonotonicClock()
    writer = LineWriter(
        line_file(folder.path, rank.global_rank),
        rank=rank.global_rank,
        buffer_events=telemetry.buffer_events,
    )
    with writer:
        writer(
            run_header(
                mesh,
                rank.global_rank,
                host=hostname(),
                epoch=agent.epoch,
                device=device_name(device),
                versions=installed_versions(("megascale", "torch", "triton")),
            )
        )
        recorder = Recorder(
            clock,
            writer,
            rank=rank.global_rank,
            span_interval=telemetry.span_interval,
            buffer_events=telemetry.buffer_events,
            hooks=hooks,
            progress=ProgressWriter(Path(agent.progress_page)) if agent.progress_page else None,
            epoch=agent.epoch,
        )
        profiles = ProfileRequests(
            folder.path,
            rank.global_rank,
            rank.world_size,
            profilers(folder.path, recorder, device, writer.path),
        )
        recorder.hooks.append(profiles)
        if telemetry.memory_snapshot_on_oom and device.type == "cuda":
            snapshot_on_oom(folder.path, recorder)
        try:
            deadline = _deadline(recorder, writer, mesh, device, telemetry.ongoing_after_s)
            with deadline, GarbagePauses(recorder), _of_node(config, folder.path, rank):
                yield recorder
        finally:
            profiles.close()
            recorder.close()


def _deadline(
    recorder: Recorder, writer: LineWriter, mesh: Mesh, device: torch.device, after_s: float
) -> AbstractContextManager[object]:
    """What records the ongoing event of this rank; a world of one has no collectives."""
    if mesh.world_size == 1:
        return nullcontext()
    on_cuda = device.type == "cuda"
    prepare = partial(torch.cuda.set_device, device) if on_cuda else None
    return Deadline(recorder, writer, mesh, after_s=after_s, prepare=prepare)


@contextmanager
def _of_node(config: RunConfig, run_dir: Path, rank: RankEnvironment) -> Iterator[None]:
    """What the first rank of a node does for the node: it samples ports when it is asked to, and
    starts the endpoint for Prometheus."""
    if rank.local_rank > 0:
        yield
        return
    first, port = rank.global_rank - rank.local_rank, config.telemetry.prometheus_port
    ranks = range(first, first + rank.local_world_size)
    endpoint = start_endpoint(run_dir, ranks, port) if port else None
    try:
        with MonitorRequests(run_dir, ranks):
            yield
    finally:
        if endpoint is not None:
            endpoint.kill()
            endpoint.wait(_ENDPOINT_S)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
