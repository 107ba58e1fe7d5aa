"""Saving and restoring a run: which tier keeps the state after which step (MegaScale 4.4).

The loop says when a step is launched (`keep`), when its values were read (`settled`) and when it
waits anyway (`save`); what is due, and in which place, is decided here by `tiers.py`. Stage 1 is
`checkpoint/memory`, stage 2 `disk_saves.py` and `remote_tier.py`; `restoring.py` is the way back.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megascale.checkpoint import BackgroundSaves, Staged
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import MemorySlots
from megascale.checkpoint.places import Location
from megascale.errors import CheckpointError
from megascale.storage import FileWriter
from megascale.telemetry.recorder import Recorder
from megascale.train.assemble import Assembly
from megascale.train.control_groups import control_group, group_behind
from megascale.train.corpus import data_identity
from megascale.train.disk_saves import DiskSaves
from megascale.train.last_checkpoint import LastCheckpoint
from megascale.train.memory_slots import open_slots
from megascale.train.remote_owner import own_remote
from megascale.train.remote_tier import RemoteTier
from megascale.train.restoring import Restored, Restorer
from megascale.train.rotation import Rotation
from megascale.train.run_folder import RunFolder
from megascale.train.sources import Place, Saved
from megascale.train.state import Progress, checkpoint_meta, state_pieces
from megascale.train.tiers import Due, Schedule
from megascale.train.waiting import Waiting

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    """A state in a slot, for the disk; its step may not have settled yet."""

    staged: Staged
    progress: Progress
    due: Due


class Persistence:
    """The states of one run, on this rank. All methods but `vote` and `close` are collective."""

    def __init__(self, assembly: Assembly, folder: RunFolder, recorder: Recorder) -> None:
        self.assembly = assembly
        self.config = assembly.config
        self.settings = assembly.config.checkpoint
        self.folder = folder
        self.recorder = recorder
        self._data = data_identity(assembly.config)
        self._ranks = Ranks(control_group(assembly))
        self._last = LastCheckpoint(folder.path)
        self._waiting = Waiting(recorder)
        places: dict[Place, Location] = {"disk": folder.checkpoints}
        if self._has_remote:
            places["remote"] = self.settings.remote
        self._restorer = Restorer(assembly, recorder, self._ranks, places, self._last, self._data)
        self._schedule = Schedule(self.settings, time.monotonic())
        self._num_updates = 0  # as of the last step that settled
        self._memory: MemorySlots | None = None
        self._is_tier = False  # it outlives this process
        self._has_room = True  # until a slot cannot be had
        self._kept: _Kept | None = None
        self._rotation = Rotation(folder.checkpoints, self.settings.keep_latest_k)
        self._writer: FileWriter | None = None
        self._behind: BackgroundSaves | None = None
        self._remote: RemoteTier | None = None
        self._disk = self._disk_saves()

    # ------------------------------------------------------------ the way back

    def restore(self, *, resume: bool) -> Progress:
        """Fill masters and moments; where the run stands."""
        if self._has_remote:
            own_remote(self.settings.remote, self.folder.path, self._ranks, resume=resume)
        self._open_tiers()
        tier = self._memory if self._is_tier else None
        restored = self._restorer.resume(tier) if resume else None
        self._disk.number_above(self._restorer.newest_number)
        progress = self._start_anew(resume) if restored is None else self._goes_on_from(restored)
        if self._memory is not None:
            self._memory.prepare()  # what it needs is said here
        good = self._rotation.loaded_from
        if good is not None and progress.step < self.config.training.steps:
            self._rotate(good)  # room for the next one, where fewer are to stay than before
        return progress

    def _start_anew(self, resume: bool) -> Progress:
        if resume:
            logger.warning("no committed checkpoint in %s: starting anew", self.folder.checkpoints)
        if self._memory is not None:
            self._memory.forget()
        source = self.settings.initial_load_path
        if source:
            self._restorer.load_weights(Path(source))
        return Progress()

    def roll_back(self) -> Progress:
        """The newest good checkpoint of this run. Raises CheckpointError where there is none."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.staged.release()
        self._disk.wait("join")
        restored = self._restorer.newest()
        if restored is None:
            raise CheckpointError(
                f"nothing to roll back to: {self.folder.checkpoints} holds no committed "
                "checkpoint; set checkpoint.interval, or training.nonfinite_policy = 'skip'"
            )
        return self._goes_on_from(restored)

    def _goes_on_from(self, restored: Restored) -> Progress:
        progress, source = restored.progress, restored.source
        self._num_updates = int(self.assembly.optimizer.step_count.item())
        self._schedule.went_to(progress.step)
        if source is not None:
            if self.assembly.is_writer:
                self._last.write(source)  # what this run follows from here on
            if source.place == "disk":
                self._disk.saved = replace(progress)
                self._rotation.loaded_from = self.folder.checkpoints / source.name
            if self._memory is not None:
                self._memory.forget()
        return replace(progress)

    # ------------------------------------------------------------ saving

    def vote(self) -> int:
        """For the step that is launched now: see `tiers.py`."""
        return self._schedule.vote(time.monotonic()) if self.assembly.is_writer else 0

    def waits_after(self, step: int) -> bool:
        """Is there a checkpoint behind `step` for which training stands still?"""
        return self._schedule.due(step).disk and not self._can_write_behind

    def keep(self, progress: Progress, *, is_settled: bool) -> None:
        """Stage 1 of what is due after the step that was launched last, and a look at what ended.
        It counts at once where the step `is_settled`, else when `settled` is called."""
        self._poll()
        due = self._schedule.due(progress.step)
        to_disk = due.disk and self._can_write_behind
        if to_disk:
            self._disk.wait("wait")
            self._rotation.join()
        if to_disk or (due.memory and self._is_tier):
            self._stage(progress, due, to_disk=to_disk)
            if is_settled:
                self._count()

    def before_update(self) -> None:
        """What is launched from here on changes the state that the last `keep` saves."""
        if self._memory is not None:
            self._memory.before_update()

    def settled(self, step: int, *, masked: bool, vote: int) -> None:
        """`step`, the one in flight at the last `keep` if any, has run and is not rolled back."""
        self._num_updates += not masked
        self._schedule.voted(step, vote)
        self._count()

    def save(self, progress: Progress, *, required: bool) -> None:
        """A checkpoint on disk that training waits for, of a step that has settled. A failed one is
        told and survived unless `required` (the last one)."""
        due = self._schedule.last() if required else self._schedule.due(progress.step)
        self._disk.required = replace(progress) if required else None
        self._disk.wait("join" if required else "wait")
        if self._disk.saved == progress:
            self._send(self._disk.path, due)  # the last one goes there, if the others did or not
            return
        self._rotation.join()
        if self.assembly.is_writer:
            self.folder.check_epoch()
        if self._can_write_behind:
            self._stage(progress, due, to_disk=True)
        if self._kept is not None:
            self._count()
            self._disk.wait("join")
        else:
            meta = checkpoint_meta(self.config, progress, self._num_updates, self._data)
            pieces = state_pieces(self.assembly.zero, self.assembly.optimizer, "counted")
            self._schedule.saved(progress.step, due, time.monotonic())
            self._disk.save(progress, due, pieces, meta)

    def finish(self) -> None:
        """Wait for what goes on behind training."""
        self._disk.wait("join")
        if self._memory is not None:
            self._memory.join()
        if self._remote is not None:
            self._remote.wait()
            if self.assembly.is_writer and self._disk.path is not None:
                self._rotation.start(self._disk.path, [])  # what was kept while it was copied
        self._rotation.join()

    def close(self) -> None:
        """End what this process started; what is not finished stays unmarked."""
        for part in (self._remote, self._writer):
            if part is not None:
                part.close()

    # ------------------------------------------------------------ inside

    @property
    def _has_remote(self) -> bool:
        return bool(self.settings.enable and self.settings.remote)

    @property
    def _can_write_behind(self) -> bool:
        return self._behind is not None and self._has_room

    def _open_tiers(self) -> None:
        """Slots, writers and groups of what this run keeps its state in. Collective."""
        folder, fence = self.folder, self.folder.check_epoch
        opened = open_slots(self.assembly, folder, self.recorder, self._ranks, self._data)
        if opened is not None:
            self._memory, self._is_tier = opened.slots, opened.is_tier
        if self.settings.is_behind:
            self._writer = FileWriter()
            self._writer.start()
            self._behind = BackgroundSaves(
                folder.checkpoints,
                Ranks(group_behind(self.assembly)),
                self._writer,
                moved=self._waiting.moved,
                fence=fence,
            )
            self._disk = self._disk_saves()
        if self._has_remote:
            self._remote = RemoteTier(
                self.settings,
                folder.checkpoints,
                Ranks(group_behind(self.assembly)),
                self.recorder,
                waiting=self._waiting,
                fence=fence,
            )

    def _disk_saves(self) -> DiskSaves:
        return DiskSaves(
            self.folder.checkpoints,
            self._ranks,
            self.recorder,
            self._waiting,
            self._behind,
            self._committed,
            self.folder.check_epoch,
        )

    def _stage(self, progress: Progress, due: Due, *, to_disk: bool) -> None:
        """Stage 1, into a slot that is held where it goes `to_disk`."""
        assert self._memory is not None
        with self.recorder.span("checkpoint", op="keep", host=True):
            self._memory.begin(progress.step, progress.consumed_samples)
            staged = self._memory.hold() if to_disk else None
        self._has_room = self._has_room and not (to_disk and staged is None)
        if staged is not None:
            self._kept = _Kept(staged, replace(progress), due)
            self._schedule.saved(progress.step, due, time.monotonic())

    def _count(self) -> None:
        """The step of the last stage 1 has settled: the slot counts, and goes to disk."""
        if self._memory is not None:
            self._memory.settled()
        kept, self._kept = self._kept, None
        if kept is not None:
            meta = checkpoint_meta(self.config, kept.progress, self._num_updates, self._data)
            self._disk.start(kept.staged, kept.progress, kept.due, meta)

    def _poll(self) -> None:
        self._disk.poll()
        if self._remote is not None:
            self._remote.poll()

    def _committed(self, path: Path, due: Due) -> None:
        """A checkpoint of this run is on disk."""
        self._send(path, due)
        if self.assembly.is_writer:
            self._last.write(Saved("disk", path.name))
        self._rotate(path)

    def _rotate(self, good: Path) -> None:
        """Old checkpoints go, behind training; `good` verifies."""
        if self.assembly.is_writer:
            names = [] if self._remote is None else self._remote.protected()
            self._rotation.start(good, names)

    def _send(self, path: Path | None, due: Due) -> None:
        if path is not None and due.remote and self._remote is not None:
            self._remote.submit(path)
