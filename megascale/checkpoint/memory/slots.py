"""Stage 1 of a checkpoint: each rank's state in host memory (MegaScale 4.4).

With an agent the memory outlives the trainer: a rank has slot files of its own, and two with copies
of a partner's (`partners.py`). A save is: an own slot is written, marked, sent to its keeper while
the network is idle (`pacing.py`), and then all ranks meet. A restart takes the newest save whose
parts are all there (`choice.py`); a rank that came to a new node gets its part from its keeper
(`bring.py`). Without an agent the slots are memory of the trainer alone: nothing is hashed, sent or
restored, but a state can be held for whoever writes it to a storage (`hold`).

Invariants:
1. No slot of a save that is complete on all ranks is written before a later save is complete on all
   ranks. So, wherever ranks are killed, the ranks together hold one whole save: at worst the one
   before that which was being made. Copies are kept by the same rule.
2. A slot that is held is never written (`ring.py`).
3. No save is dropped: one that begins while the save before is being hashed or sent, or while no
   slot is free, waits, and that is told (`Waits`).

On a GPU the copy runs beside the next step's forward and backward, which only read the state, and
the update waits for it; values are hashed as they arrive, and the rest goes on behind training: of
45 GB at every step of 1.21 s the loop lost 4.7 ms (H200, 16 cores). Where the loop does not run a
step ahead, hashing and sending belong in `settled`: behind training a kill could cost two steps.

What a save keeps the loop on a CPU, two cores in use by others (load 8 to 14), hashed by CRC-32: of
64 MiB a rank, 7 ms to copy (`begin`) and 18 ms for the rest; with copies between two ranks 8 and
82 ms. Of 512 MiB: 79 and 194 ms, with copies 152 and 842 ms.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory.allocation import Allocation, make_room
from megascale.checkpoint.memory.arrangement import arrange, site_of, slots_at
from megascale.checkpoint.memory.begun import Begun
from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.bring import WAYS, bring
from megascale.checkpoint.memory.completion import Completion
from megascale.checkpoint.memory.hashing import Arrival
from megascale.checkpoint.memory.pacing import Pacer, never_busy
from megascale.checkpoint.memory.partners import Place
from megascale.checkpoint.memory.restore import find
from megascale.checkpoint.memory.ring import Ring
from megascale.checkpoint.memory.room import describe_need, per_node
from megascale.checkpoint.memory.slot import Stamp
from megascale.checkpoint.memory.waits import Waits
from megascale.checkpoint.memory.worker import in_thread
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.staged import Staged
from megascale.env import hostname
from megascale.errors import CheckpointError
from megascale.topology import Mesh

logger = logging.getLogger(__name__)


class MemorySlots:
    """The slots of this rank. All methods are collective, in one order on all ranks, but `hold`.

    prefix    of the slot files' paths, other for each rank of a node, one folder an agent; None on
              all ranks: no agent owns the memory, it goes with the trainer
    counted, copies  the pieces that this rank holds: which it writes to a checkpoint, and the rest
    ranks     all of them, on the CPU
    num_own   slots of its own: 2, and 1 more where they are held; without an agent 1 is enough
    is_behind     hashing and sending go on in a thread behind training; else within `settled`
    group_behind  all ranks (gloo), for that thread alone
    identity  of the run; states of another are not restored
    epoch     of the job
    on_peers  keep a copy with a partner
    network_is_busy, most_paced_s  see `pacing.py`
    timeout_s  of a collective: of a save's copy, and then of its meeting
    told      called with a kind and details of what should be recorded, by the thread that trains
    """

    def __init__(
        self,
        prefix: str | None,
        counted: Iterable[Piece],
        copies: Iterable[Piece],
        mesh: Mesh,
        ranks: Ranks,
        *,
        identity: str,
        epoch: int,
        device: torch.device,
        num_own: int = 2,
        on_peers: bool = True,
        is_behind: bool = False,
        group_behind: dist.ProcessGroup | None = None,
        network_is_busy: Callable[[], bool] = never_busy,
        most_paced_s: float = 5.0,
        timeout_s: float = 600.0,
        told: Callable[[str, dict[str, object]], None] = lambda _kind, _detail: None,
    ) -> None:
        assert num_own >= (1 if prefix is None else 2), num_own
        self._body = Body(counted, copies)
        self._outlives = prefix is not None
        own, self._copies, self._former = slots_at(prefix, num_own)
        self._ring = Ring(own)
        self._files = [*own, *self._copies, *self._former]
        self._ranks, self._is_behind, self._device = ranks, is_behind, device
        self._identity, self._epoch = identity, epoch
        self._layout = f"tensor {mesh.tensor}, data {mesh.data}, pipeline {mesh.pipeline}"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        folder = Path(prefix).parent if prefix is not None else None
        place = Place(hostname(), str(folder))
        sites = ranks.gather(lambda: site_of(place, self._body, self._files))
        self._start = sites[0].start
        self._number = max(site.newest_number for site in sites)
        self._all = arrange(
            sites,
            ranks.rank,
            mesh,
            on_peers=on_peers and self._outlives,
            num_own=num_own,
            num_copies=len(self._copies),
        )
        if self._all.said is not None and ranks.is_writer:
            logger.info(self._all.said)
        self._room = Allocation(
            ranks, self._all.needs, [*own, *self._copies], folder, self._allocate
        )
        self._completion = Completion(
            self._body,
            self._copies,
            ranks.rank,
            self._all,
            group_behind if is_behind else ranks.group,
            Pacer(network_is_busy, most_s=most_paced_s),
            identity=identity,
            layout=self._layout,
        )
        self._most_s = 2.0 * timeout_s + most_paced_s
        self.waits = Waits(told)
        self._begun: Begun | None = None  # not settled yet
        self._last: Begun | None = None
        self._copied: torch.cuda.Event | None = None  # what the next update has to wait for
        self._running: Future[None] | None = None

    # ------------------------------------------------------------ memory

    @property
    def bytes_needed(self) -> int:
        """Of the node that needs most, for the slots of all its ranks."""
        return max(per_node(self._all.needs).values())

    def describe_memory(self) -> str:
        """One line: what the slots take of a node."""
        return describe_need(self._all.needs)

    def prepare(self) -> None:
        """Begin to make room behind training, after what is restored was; else the first save
        does it."""
        self._room.prepare()

    def _allocate(self) -> None:
        make_room(
            self._ring.slots,
            self._body.image_bytes,
            self._completion.copies_to_size(),
            self._all.kept_bytes,
            self._device,
            self._all.num_threads,
        )

    # ------------------------------------------------------------ saving

    def begin(self, step: int, consumed_samples: int) -> None:
        """Copy the state as it is after `step`; it counts once `settled` was called.

        Waits for the save before. On CUDA the copy is queued behind what was launched and runs
        beside what is launched next, which must not change the state before `before_update`.
        """
        if self._running is not None and not self._running.done():
            since, doing = time.monotonic(), self._completion.doing
            self.join()
            self.waits.add(step, doing, time.monotonic() - since)
        self.join()
        if not self._room.is_there():
            return
        if self._begun is not None:
            self._begun.void(f"step {step} was saved before it was settled")
        slot, waited_s = self._ring.next(self._completion.complete)
        self.waits.add(step, "a checkpoint that is written holds a slot", waited_s)
        self._number += 1
        stamp = Stamp(self._epoch, self._number, self._start, step, consumed_samples)
        slot.begin()
        copied, arrivals = self._copy_out(slot.image)
        hashed = self._hashed(slot.image, arrivals) if arrivals and self._outlives else None
        self._begun = self._last = Begun(slot, stamp, copied, hashed)
        self._copied = self._begun.copied

    def before_update(self) -> None:
        """What is launched from here on may change the state: on CUDA it waits for the copy."""
        copied, self._copied = self._copied, None
        if copied is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(copied)

    def hold(self) -> Staged | None:
        """The state of the last `begin`, for whoever writes it; before the next `begin`, on this
        rank alone. None where there is none (no room). Its slot is not written before `release`,
        so with two slots the second save from here on waits for that."""
        last, body = self._last, self._body
        if last is None:
            return None
        return Staged(
            step=last.stamp.step,
            consumed_samples=last.stamp.consumed_samples,
            path=last.slot.path,
            start=body.start,
            entries=body.entries,
            wait=last.wait,
            release=self._ring.hold(last.slot),
        )

    def settled(self) -> None:
        """The step of the last `begin` has run and is not rolled back: complete the save, here or
        behind training."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        begun.outcome.set_result(None)
        if not self._outlives:
            return
        if self._is_behind:
            self._running = in_thread(lambda: self._finish(begun))
        else:
            self._finish(begun)

    def join(self) -> None:
        """Wait for what goes on behind training; raises what it ended with."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.result(self._most_s)
        except TimeoutError:
            raise CheckpointError(self._completion.why_late(self._most_s)) from None

    def forget(self) -> None:
        """The run goes back: what the slots hold is of a branch that ends."""
        self.join()
        self._room.pause()
        if self._begun is not None:
            self._begun.void("the run went back")
        self._begun = self._last = self._completion.complete = None
        for slot in self._files:
            slot.begin()

    def _copy_out(self, image: Tensor) -> tuple[torch.cuda.Event | None, list[Arrival]]:
        """What is passed once all values are there, and once parts of them are."""
        if self._stream is None:
            self._body.copy_out(image)
            return None, []
        stream, arrivals = self._stream, list[Arrival]()

        def passed(stop: int) -> None:
            event = stream.record_event(torch.cuda.Event(blocking=True))  # no core spins for it
            arrivals.append(Arrival(stop, event.synchronize))

        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._body.copy_out(image, passed)
            copied = stream.record_event(torch.cuda.Event(blocking=True))
        return copied, [*arrivals, Arrival(self._body.num_bytes, copied.synchronize)]

    def _hashed(self, image: Tensor, arrivals: Sequence[Arrival]) -> Future[str]:
        """Begins before the step is settled: the host learns of its end a launch later, by when
        the next step is over as well."""
        return in_thread(lambda: self._completion.hash_of(image, arrivals))

    def _finish(self, begun: Begun) -> None:
        """The save counts."""
        if begun.copied is not None:
            begun.copied.synchronize()
        self._completion.run(begun.slot, begun.stamp, begun.hashed)
        for slot in self._former:  # of a start that had more slots: a later save is complete
            slot.release()

    # ------------------------------------------------------------ restoring

    def restore(self, newer_than: int | None, *, ways: Sequence[str] = WAYS) -> Stamp | None:
        """Fill the pieces from the newest save that is of a later step than `newer_than`, and say
        which; None where there is none, and why is logged: the pieces are as before. Raises
        HalfRestoredError (`bring.py`) where they are not."""
        if not self._outlives:
            return None
        choice = find(
            self._files,
            self._ranks,
            self._all.sites,
            self._completion.hasher,
            identity=self._identity,
            layout=self._layout,
            newer_than=newer_than,
        )
        if choice is None:
            return None
        bring(
            choice,
            self._files,
            self._ranks,
            self._all.sites,
            self._body,
            num_threads=self._all.num_threads,
            device=self._device,
            ways=ways,
        )
        self._completion.complete = choice.stamp
        return choice.stamp
