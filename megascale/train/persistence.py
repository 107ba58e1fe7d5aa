"""Saving and restoring a run: which checkpoint, into which tensors, with which checks."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megascale.checkpoint import (
    FullReader,
    apply_retention,
    find_latest,
    load_checkpoint,
    read_meta,
    save_checkpoint,
)
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.durable import write_durably
from megascale.checkpoint.manifest import list_checkpoints, name_order
from megascale.checkpoint.memory import MemorySlots
from megascale.checkpoint.saved_model import find_checkpoint
from megascale.env import agent_environment
from megascale.errors import CheckpointError
from megascale.telemetry.recorder import Recorder
from megascale.train.assemble import Assembly
from megascale.train.convert import hf_master_pieces_loader
from megascale.train.corpus import data_identity
from megascale.train.memory_slots import open_slots
from megascale.train.replicas import check_replicas
from megascale.train.run_folder import RunFolder
from megascale.train.state import (
    Progress,
    check_same_model,
    check_same_samples,
    check_same_tokenizer,
    checkpoint_meta,
    master_pieces,
    state_pieces,
)

logger = logging.getLogger(__name__)


class Persistence:
    """The checkpoints of one run, on this rank: on disk, and between them in memory that outlives
    it. All methods are collective."""

    def __init__(self, assembly: Assembly, folder: RunFolder, recorder: Recorder) -> None:
        self.assembly = assembly
        self.config = assembly.config
        self.folder = folder
        self.recorder = recorder
        self._data = data_identity(assembly.config)
        self._group = _control_group(assembly)
        self._ranks = Ranks(self._group)
        self._last_file = folder.path / "last_checkpoint.json"
        self._loaded_from: Path | None = None
        self._saved: Progress | None = None
        self._has_rotated = False
        self._memory: MemorySlots | None = None

    def restore(self, *, resume: bool) -> Progress:
        """Fill masters and moments; where the run stands."""
        self._memory = open_slots(self.assembly, self.folder, self._ranks, self._data)
        if resume:
            progress = self._resume()
            if progress is not None:
                return progress
            self._refuse_if_any_was_committed()
            logger.warning("no committed checkpoint in %s: starting anew", self.folder.checkpoints)
        if self._memory is not None:
            self._memory.forget()
        source = self.config.checkpoint.initial_load_path
        if source:
            self._load_weights(Path(source))
        return Progress()

    def _resume(self) -> Progress | None:
        """From memory or from disk, whichever is further; None where there is neither."""
        listing = self._ranks.writer_does(lambda: list_checkpoints(self.folder.checkpoints))
        newest = listing.committed[0] if listing.committed else None
        there = {path.name for path in (*listing.committed, *listing.damaged)}
        may_use_memory = not (agent_environment().from_disk or self._was_cut_off(there))
        progress = self._from_memory(newest) if may_use_memory else None
        if progress is None:
            path = find_latest(self.folder.checkpoints, group=self._group)
            if path != newest and may_use_memory:  # memory may be further than what is not damaged
                progress = self._from_memory(path)
            if progress is None and path is not None:
                progress = self.load(path)
        return progress

    def _was_cut_off(self, there: set[str]) -> bool:
        """Whoever takes the newest checkpoint away wants the run to go on from an earlier state."""
        if self._memory is None:
            return False
        last = self._ranks.writer_does(self._last_name)
        if last is None or last in there:
            return False
        if self.assembly.is_writer:
            logger.warning("memory slots are not used: checkpoint %s was taken away", last)
        return True

    def _from_memory(self, disk: Path | None) -> Progress | None:
        """A save of a later step than checkpoint `disk`, where all ranks' parts can be had."""
        if self._memory is None:
            return None
        self.assembly.zero.wait_for_parameters()  # as in `load`
        with self.recorder.span("checkpoint", op="load", host=True):
            stamp = self._memory.restore(name_order(disk)[0] if disk else None)
        if stamp is None:
            return None
        self._after_load(f"step {stamp.step} from memory")
        logger.info("resumed from memory at step %d", stamp.step)
        return Progress(step=stamp.step, consumed_samples=stamp.consumed_samples)

    def load(self, path: Path) -> Progress:
        """Everything from a checkpoint that was just verified."""
        self._ranks.writer_does(lambda: _refuse_weights_alone(path))
        meta = read_meta(path)
        check_same_model(meta["model"], self.config.model, str(path), resume=True)
        check_same_samples(meta, self.config, self._data, str(path))
        self.assembly.zero.wait_for_parameters()  # a gather in flight would write over what is read
        pieces = state_pieces(self.assembly.zero, self.assembly.optimizer, "all")
        with self.recorder.span("checkpoint", op="load", host=True):
            load_checkpoint(path, pieces, group=self._group, verified=True)
        self.assembly.optimizer.step_count.fill_(meta["num_updates"])
        self._after_load(str(path))
        self._loaded_from = path
        logger.info("resumed from %s at step %d", path, meta["step"])
        progress = Progress(step=meta["step"], consumed_samples=meta["consumed_samples"])
        self._saved = replace(progress)
        if self.assembly.is_writer:
            self._remember(progress.step, path)  # what this run follows from here on
        if self._memory is not None:
            self._memory.forget()
        return progress

    def _refuse_if_any_was_committed(self) -> None:
        """Starting anew beside damaged checkpoints would rotate them out."""
        listing = self._ranks.writer_does(lambda: list_checkpoints(self.folder.checkpoints))
        num_damaged = len(listing.committed) + len(listing.damaged)
        if num_damaged:
            raise CheckpointError(
                f"none of the {num_damaged} checkpoints in {self.folder.checkpoints} is whole "
                "(the warnings above say why); restore what they lack from a copy, or start a new "
                "run with --set job.run_dir=ANOTHER"
            )
        last = self._ranks.writer_does(self._last_saved)
        if last is not None:
            raise CheckpointError(
                f"this run saved step {last[0]}, but {self.folder.checkpoints} holds no "
                "checkpoint; mount its storage or put the checkpoints back, or start a new run "
                "with --set job.run_dir=ANOTHER"
            )

    def _last_saved(self) -> tuple[int, str] | None:
        """Step and name of the last checkpoint that this run committed or loaded, told by its
        folder."""
        try:
            record = json.loads(self._last_file.read_bytes())
            return int(record["step"]), str(record["name"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{self._last_file} is damaged, so this run did save a checkpoint, but "
                f"{self.folder.checkpoints} holds none; put the checkpoints back, or start a new "
                "run with --set job.run_dir=ANOTHER"
            ) from None

    def _last_name(self) -> str | None:
        """None also where the record is damaged: other checkpoints may be whole."""
        try:
            last = self._last_saved()
        except CheckpointError:
            return None
        return last[1] if last else None

    def _remember(self, step: int, path: Path) -> None:
        """Written beside the checkpoints' folder, which may be another storage that goes away."""
        record = json.dumps({"step": step, "name": path.name}).encode() + b"\n"
        try:
            if not self._last_file.exists() or self._last_file.read_bytes() != record:
                write_durably(self._last_file, record)
        except OSError as error:
            logger.warning("%s was not written: %s", self._last_file, error)

    def roll_back(self) -> Progress:
        """The newest good checkpoint of this run. Raises CheckpointError where there is none."""
        path = find_latest(self.folder.checkpoints, group=self._group)
        if path is None:
            raise CheckpointError(
                f"nothing to roll back to: {self.folder.checkpoints} holds no committed "
                "checkpoint; set checkpoint.interval, or training.nonfinite_policy = 'skip'"
            )
        return self.load(path)

    def keep(self, progress: Progress, *, is_settled: bool) -> None:
        """Save to memory what is on the device now. It counts at once where the step `is_settled`,
        else when `settled` is called."""
        if self._memory is None:
            return
        with self.recorder.span("checkpoint", op="keep", host=True):
            self._memory.begin(progress.step, progress.consumed_samples)
            if is_settled:
                self._memory.settled()

    def before_update(self) -> None:
        """What is launched from here on changes the state that the last `keep` saves."""
        if self._memory is not None:
            self._memory.before_update()

    def settled(self) -> None:
        """The step in flight at the last `keep`, if any, has run, and is not rolled back."""
        if self._memory is not None:
            self._memory.settled()

    def finish(self) -> None:
        """Wait for what goes on behind training."""
        if self._memory is not None:
            self._memory.join()

    def save(self, progress: Progress, *, required: bool) -> None:
        """Save and rotate. A failed save is told and survived unless `required` (the last one)."""
        if self._saved == progress:
            return
        if self.assembly.is_writer:
            self.folder.check_epoch()
        zero, optimizer = self.assembly.zero, self.assembly.optimizer
        num_updates = int(optimizer.step_count.item())
        meta = checkpoint_meta(self.config, progress, num_updates, self._data)
        pieces = state_pieces(zero, optimizer, "counted")
        try:
            with self.recorder.span("checkpoint", op="save", host=True):
                where, step, moved = self.folder.checkpoints, progress.step, self.recorder.moved
                path = save_checkpoint(where, step, pieces, meta, group=self._group, moved=moved)
        except CheckpointError as error:
            self.recorder.incident("checkpoint_failed", step=progress.step, reason=str(error))
            if required:
                raise
            logger.error("step %d was not saved, training goes on: %s", progress.step, error)
            return
        finally:
            self.recorder.moved(over=True)
        self._saved = replace(progress)
        self.recorder.checkpoint(progress.step, str(path))
        if self.assembly.is_writer:
            self._remember(progress.step, path)
            self._rotate(path)

    def _rotate(self, newest: Path) -> None:
        """The first deletion is told; the others, of every save from there on, are not."""
        most = self.config.checkpoint.keep_latest_k
        protect = [self._loaded_from] if self._loaded_from else []
        gone = apply_retention(self.folder.checkpoints, most, protect=protect, known_good=newest)
        if gone and not self._has_rotated:
            names, what = ", ".join(path.name for path in gone), "checkpoint.keep_latest_k"
            logger.info("deleted %s: the last %d checkpoints stay (%s)", names, most, what)
        self._has_rotated = self._has_rotated or bool(gone)

    def _load_weights(self, source: Path) -> None:
        """Masters alone, from a Hugging Face folder or a checkpoint of ours; fresh optimizer."""
        self.assembly.zero.wait_for_parameters()
        pieces = master_pieces(self.assembly.zero)
        if self.config.checkpoint.initial_load_in_hf:
            hf_master_pieces_loader(source, pieces, self.config.model, group=self._group)
        else:
            path = find_checkpoint(source, group=self._group)
            meta = read_meta(path)
            check_same_model(meta["model"], self.config.model, str(path), resume=False)
            check_same_tokenizer(meta, self._data, str(path))
            load_checkpoint(path, pieces, group=self._group, verified=True)
        self._after_load(str(source))
        logger.info("weights from %s, fresh optimizer", source)

    def _after_load(self, where: str) -> None:
        """Parameters follow from the masters by the normal all-gather; replicas must agree."""
        with torch.no_grad():
            self.assembly.zero.gather_parameters()
        check_replicas(self.assembly, f"after loading {where}", recorder=self.recorder)


def _refuse_weights_alone(path: Path) -> None:
    """What `convert from-hf` makes has nothing to go on from."""
    if not FullReader(path, verified=True).keys("exp_avg/"):
        raise CheckpointError(
            f"{path} holds weights only, no optimizer state, so no run can be resumed from it; "
            f"start a new one with --set checkpoint.initial_load_path={path}"
        )


def _control_group(assembly: Assembly) -> dist.ProcessGroup | None:
    """All ranks, on the CPU: for plans, hashes and agreements, never for tensors."""
    if assembly.mesh.world_size == 1:
        return None
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    timeout = timedelta(seconds=assembly.config.comm.timeout_s)
    return dist.new_group(backend="gloo", timeout=timeout)
