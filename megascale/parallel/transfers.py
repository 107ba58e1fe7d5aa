"""Point-to-point channels between pipeline stages, and the transfers on them (MegaScale 3.2).

Each (source, destination, activation | gradient) has a communicator of its own: on one that is
shared, a receive posted early would hold up whatever is posted behind it, and two stages that send
to each other first would wait for ever. Shapes and dtypes are known, so nothing but the values is
sent.

Who owns what: a receive buffer belongs to `Receive` until its `wait()`, then to the caller. A sent
tensor is kept alive here until its send has been waited for: at the latest when SEND_WINDOW more
are to be sent on the channel, or at `finish()`.

Creation: eager, in one global order, no barrier over all ranks (MegaScale 3.5). Edges that leave
even stages come first, then odd ones, so that a chain of p stages connects in two or three rounds
instead of p. A handshake on each channel makes NCCL build its communicator there and then: built
lazily, inside a step, two ranks whose first act is to send to each other wait for ever (tried with
torch 2.11 on two H200s). Four channels with their handshakes take 1.0 s there.
Every rank passes over the channels of others, which costs 7 us each and no traffic (0.3 s at 12,288
ranks). torch's `use_local_synchronization` would save that, but derives a group's name from how
many groups the rank has made before, and here that differs between the two ends.

CUDA: a transfer runs on its communicator's stream, behind what the compute stream held when it was
posted; `wait()` orders streams and does not block the host. CUDA_DEVICE_MAX_CONNECTIONS=1 would put
all streams in one queue, where a receive that still waits for its peer blocks the computation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import LaunchError
from megascale.plan.actions import Channel, Payload
from megascale.plan.schedules.transfers import SEND_WINDOW
from megascale.topology import Mesh


@dataclass(frozen=True)
class Link:
    """This rank's end of a channel: the communicator and the global rank at the other end."""

    group: dist.ProcessGroup
    peer_rank: int


def channels_in_order(mesh: Mesh, *, wrap: bool) -> list[tuple[Channel, int, int]]:
    """Every channel with its (source, destination) global ranks, in the order of creation.

    wrap  whether the last stage also sends activations to the first (several chunks a stage)
    """
    found = []
    for first, second in mesh.edges():
        stage, next_stage = mesh.coordinates(first).pp_rank, mesh.coordinates(second).pp_rank
        if next_stage < stage and not wrap:
            continue
        found.append((Channel(stage, next_stage, Payload.ACTIVATION), first, second))
        found.append((Channel(next_stage, stage, Payload.GRADIENT), second, first))
    return sorted(found, key=lambda entry: _edge_start(*entry) % 2)


def _edge_start(channel: Channel, _source: int, _destination: int) -> int:
    forward = channel.payload is Payload.ACTIVATION
    return channel.source if forward else channel.destination


def create_links(
    mesh: Mesh, *, wrap: bool, device: torch.device, timeout_s: float
) -> dict[Channel, Link]:
    """This rank's ends of the pipeline's channels. All ranks of the world call this together.

    Raises LaunchError naming the peer that did not answer.
    """
    if mesh.pipeline == 1:
        return {}
    world = dist.group.WORLD
    assert world is not None, "the default process group is not initialised"
    assert device.type == "cpu" or world.bound_device_id is None, (
        "the default group is bound to a device, so NCCL would split each new group from it, which "
        "all ranks must join; initialise without device_id and call torch.cuda.set_device"
    )
    global_rank = dist.get_rank()
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    links = {}
    for channel, source, destination in channels_in_order(mesh, wrap=wrap):
        peer_rank = destination if global_rank == source else source
        try:
            group = dist.new_group([source, destination], timeout=timeout, backend=backend)
            if global_rank not in (source, destination):
                continue
            _handshake(group, peer_rank, sends=global_rank == source, device=device)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {global_rank}: no answer from rank {peer_rank} on the pipeline channel "
                f"{channel.source} -> {channel.destination} ({channel.payload}): {error}; see that "
                "rank's log, it failed or never started"
            ) from error
        links[channel] = Link(group, peer_rank)
    return links


def _handshake(
    group: dist.ProcessGroup, peer_rank: int, *, sends: bool, device: torch.device
) -> None:
    token = torch.zeros(1, device=device)
    post = dist.isend if sends else dist.irecv
    work = post(token, peer_rank, group=group)
    assert work is not None
    work.wait()


class Receive:
    """A posted receive."""

    def __init__(self, buffer: Tensor, work: dist.Work, what: str) -> None:
        self._buffer, self._what = buffer, what
        self._work: dist.Work | None = work

    def wait(self) -> Tensor:
        """The received tensor (on CUDA: valid for the current stream)."""
        if self._work is not None:
            _wait(self._work, f"receiving {self._what}")
            self._work = None
        return self._buffer


class Transfers:
    """Posts sends and receives of one stage. All values have one shape and dtype."""

    def __init__(
        self,
        links: dict[Channel, Link],
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._links = links
        self._shape, self._dtype, self._device = shape, dtype, device
        self._sent: dict[Channel, deque[tuple[dist.Work, Tensor]]] = {
            channel: deque() for channel in links
        }

    @property
    def num_bytes(self) -> int:
        """Of one value."""
        return prod(self._shape) * self._dtype.itemsize

    def receive(self, channel: Channel) -> Receive:
        link = self._links[channel]
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, link.peer_rank, group=link.group)
        assert work is not None
        return Receive(buffer, work, f"{channel.payload} from rank {link.peer_rank}")

    def send(self, channel: Channel, value: Tensor) -> None:
        """Post a send of `value`, which must not be written to afterwards."""
        assert (tuple(value.shape), value.dtype) == (self._shape, self._dtype), (
            f"{channel}: got {tuple(value.shape)} {value.dtype}, the other end expects "
            f"{self._shape} {self._dtype}"
        )
        while len(self._sent[channel]) >= SEND_WINDOW:
            self._complete_oldest(channel)
        link = self._links[channel]
        value = value.contiguous()
        work = dist.isend(value, link.peer_rank, group=link.group)
        assert work is not None
        self._sent[channel].append((work, value))

    def finish(self) -> None:
        """Wait for all sends posted so far and let go of their tensors."""
        for channel, sent in self._sent.items():
            while sent:
                self._complete_oldest(channel)

    def _complete_oldest(self, channel: Channel) -> None:
        work, _ = self._sent[channel].popleft()
        _wait(work, f"sending {channel.payload} to rank {self._links[channel].peer_rank}")


def _wait(work: dist.Work, what: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LaunchError(f"rank {dist.get_rank()} failed while {what}: {error}") from error
