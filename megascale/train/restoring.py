"""From what a run goes on: own memory, a peer's memory, disk, remote, whichever is furthest.

Each refusal is said, and the next one tried. What was loaded is compared with what was saved by the
digests of the state, and parameters between replicas. Whoever cannot be loaded because it is of
another run ends the start: then something older is not what anybody wants.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint import (
    FullReader,
    PlanCache,
    agree_digests,
    digest_pieces,
    load_checkpoint,
    read_meta,
)
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.load import manifest_together
from megascale.checkpoint.manifest import OtherFormatError, list_checkpoints, read_mark
from megascale.checkpoint.memory import MemorySlots
from megascale.checkpoint.memory.bring import HalfRestoredError
from megascale.checkpoint.places import Location, locate, name_of, opened
from megascale.checkpoint.reading import DamagedError
from megascale.checkpoint.saved_model import find_checkpoint
from megascale.env import agent_environment
from megascale.errors import CheckpointError
from megascale.telemetry.recorder import Recorder
from megascale.train.assemble import Assembly
from megascale.train.convert import hf_master_pieces_loader
from megascale.train.last_checkpoint import LastCheckpoint
from megascale.train.replicas import check_replicas
from megascale.train.sources import Place, Saved, in_order, was_taken_away
from megascale.train.state import (
    Progress,
    check_same_model,
    check_same_samples,
    check_same_tokenizer,
    master_pieces,
    state_pieces,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """Where the run stands. `source`: the checkpoint; None: memory."""

    progress: Progress
    source: Saved | None


@dataclass(frozen=True)
class _Found:
    """What a place holds. `names`: of all that is there, damaged or not."""

    saved: tuple[Saved, ...] = ()
    names: tuple[str, ...] = ()


class Restorer:
    """Fills masters and moments of this rank. All methods are collective.

    places  of checkpoints: the folder on disk, and the remote where there is one
    data    `corpus.data_identity`
    """

    def __init__(
        self,
        assembly: Assembly,
        recorder: Recorder,
        ranks: Ranks,
        places: dict[Place, Location],
        last: LastCheckpoint,
        data: dict[str, str],
    ) -> None:
        self._assembly, self._recorder, self._ranks = assembly, recorder, ranks
        self._places, self._last, self._data = places, last, data
        self._plans = PlanCache()  # a roll-back, or the next older checkpoint, reads no header
        self._is_half = False  # does the state come from memory in part?
        self.newest_number = 0  # of all saves that were seen, whether gone on from or not

    def resume(self, memory: MemorySlots | None) -> Restored | None:
        """The furthest that can be had; None where nothing was ever saved. Raises CheckpointError
        where something was, and nothing can be loaded."""
        disk, remote = self._look("disk"), self._look("remote")
        numbers = [saved.number for saved in (*disk.saved, *remote.saved)]
        self.newest_number = max(numbers, default=0)
        last = self._ranks.writer_does(self._last.read_if_whole)
        went_back = agent_environment().from_disk
        if was_taken_away(last, disk.names, remote.names):
            assert last is not None
            went_back = True
            if memory is not None or remote.saved:
                self._warn(
                    f"memory slots are not used: checkpoint {last.name} was taken away; nor are "
                    "newer copies of a remote"
                )
        candidates = in_order(disk.saved, remote.saved, went_back=went_back)
        restored = self._first_good(candidates, None if went_back else memory)
        if restored is None:
            self._refuse_to_start_anew(len({*disk.names, *remote.names}))
        return restored

    def newest(self) -> Restored | None:
        """The newest checkpoint that can be loaded, whatever memory holds."""
        disk, remote = self._look("disk"), self._look("remote")
        candidates = in_order(disk.saved, remote.saved, went_back=False)
        return self._first_good(candidates, None)

    def load_weights(self, source: Path) -> None:
        """Masters alone, from a Hugging Face folder or a checkpoint of ours; fresh optimizer."""
        config, group = self._assembly.config, self._ranks.group
        self._assembly.zero.wait_for_parameters()
        pieces = master_pieces(self._assembly.zero)
        if config.checkpoint.initial_load_in_hf:
            hf_master_pieces_loader(source, pieces, config.model, group=group)
        else:
            path = find_checkpoint(source, group=group)
            meta = read_meta(path)
            check_same_model(meta["model"], config.model, str(path), resume=False)
            check_same_tokenizer(meta, self._data, str(path))
            load_checkpoint(path, pieces, group=group, verified=True)
        self._after_load(str(source))
        logger.info("weights from %s, fresh optimizer", source)

    # ------------------------------------------------------------ inside

    def _look(self, place: Place) -> _Found:
        """A remote that cannot be reached is as good as none, and said."""
        root = self._places.get(place)
        if root is None:
            return _Found()

        def look() -> _Found:
            listing = list_checkpoints(root)
            saved = [
                Saved(place, name_of(p), read_mark(*opened(p)).number) for p in listing.committed
            ]
            names = [name_of(path) for path in (*listing.committed, *listing.damaged)]
            for path in listing.interrupted:
                logger.warning("skipping %s: no commit mark, its save was interrupted", path)
            for path in listing.damaged:
                logger.warning("skipping %s: its mark is missing or damaged", path)
            return _Found(tuple(saved), tuple(names))

        try:
            return self._ranks.writer_does(look)
        except CheckpointError as error:
            if place == "disk":
                raise
            self._warn(f"checkpoints at {root} are not used: {error}")
            return _Found()

    def _first_good(self, candidates: list[Saved], memory: MemorySlots | None) -> Restored | None:
        """Memory is asked again behind each that does not load: it may be further than the next."""
        for saved in candidates:
            restored = self._from_memory(memory, saved.step) or self._from(saved)
            if restored is not None:
                return restored
        return self._from_memory(memory, None)

    def _from_memory(self, memory: MemorySlots | None, newest: int | None) -> Restored | None:
        """A save of a later step than `newest`, where all ranks' parts can be had."""
        if memory is None:
            return None
        self._assembly.zero.wait_for_parameters()  # as in `_from`
        try:
            with self._recorder.span("checkpoint", op="load", host=True):
                stamp = memory.restore(newest)
        except CheckpointError as error:  # on all ranks alike
            self._is_half = self._is_half or isinstance(error, HalfRestoredError)
            self._warn(f"memory slots are not used: {error}")
            return None
        if stamp is None:
            return None
        self._after_load(f"step {stamp.step} from memory")
        logger.info("resumed from memory at step %d", stamp.step)
        return Restored(Progress(stamp.step, stamp.consumed_samples), None)

    def _from(self, saved: Saved) -> Restored | None:
        """None where it does not load; the state may be half filled then."""
        path = locate(self._places[saved.place], saved.name)
        try:
            manifest_together(path, self._ranks)
            meta = self._ranks.writer_does(lambda: _meta_of_a_run(path))
        except OtherFormatError:
            raise  # an older one is not what anybody wants
        except CheckpointError as error:
            self._warn(f"skipping a corrupt checkpoint: {error}")
            return None
        if meta is None:
            raise CheckpointError(
                f"{path} holds weights only, no optimizer state, so no run can be resumed from it; "
                f"start a new one with --set checkpoint.initial_load_path={path}"
            )
        check_same_model(meta["model"], self._assembly.config.model, str(path), resume=True)
        check_same_samples(meta, self._assembly.config, self._data, str(path))
        self._assembly.zero.wait_for_parameters()  # a gather in flight would write over the values
        pieces = state_pieces(self._assembly.zero, self._assembly.optimizer, "all")
        try:
            with self._recorder.span("checkpoint", op="load", host=True):
                loaded = load_checkpoint(path, pieces, group=self._ranks.group, plans=self._plans)
                if meta["dtype"] == self._assembly.config.training.dtype:
                    self._compare(loaded.digests, str(path))
        except DamagedError as error:
            self._warn(f"skipping a corrupt checkpoint: {error}")
            return None
        except CheckpointError as error:
            if saved.place == "disk":
                raise
            self._warn(f"skipping {path}: {error}")
            return None
        self._assembly.optimizer.step_count.fill_(meta["num_updates"])
        self._after_load(str(path))
        logger.info("resumed from %s at step %d", path, meta["step"])
        return Restored(Progress(meta["step"], meta["consumed_samples"]), saved)

    def _compare(self, saved: dict[str, str], where: str) -> None:
        """Raises DamagedError where the state is not what was saved, whatever its layout was."""
        zero, optimizer = self._assembly.zero, self._assembly.optimizer
        own = digest_pieces(state_pieces(zero, optimizer, "counted"))
        now = agree_digests(own, self._ranks)
        different = [kind for kind, digest in saved.items() if now.get(kind) != digest]
        if different:
            raise DamagedError(
                f"{where}: what was loaded of {', '.join(different)} is not what was saved, by its "
                "digest; use another checkpoint, and test the machines"
            )

    def _after_load(self, where: str) -> None:
        """Parameters follow from the masters by the normal all-gather; replicas must agree."""
        with torch.no_grad():
            self._assembly.zero.gather_parameters()
        check_replicas(self._assembly, f"after loading {where}", recorder=self._recorder)

    def _refuse_to_start_anew(self, num_there: int) -> None:
        """Raises where a run that starts anew would rotate out what could be mended."""
        told = " and ".join(str(root) for root in self._places.values())
        if self._is_half:
            raise CheckpointError(
                f"what memory held was read in part, and {told} holds no checkpoint that can be "
                "loaded; start again: what memory holds is unchanged, or the run starts anew"
            )
        if num_there:
            raise CheckpointError(
                f"none of the {num_there} checkpoints in {told} is whole (the warnings above say "
                "why); restore what they lack from a copy, or start a new run with --set "
                "job.run_dir=ANOTHER"
            )
        last = self._ranks.writer_does(self._last.read)
        if last is not None:
            raise CheckpointError(
                f"this run saved step {last.step}, but no checkpoint was found in {told}; mount "
                "its storage or put the checkpoints back, or start a new run with --set "
                "job.run_dir=ANOTHER"
            )

    def _warn(self, message: str) -> None:
        if self._ranks.is_writer:
            logger.warning(message)


def _meta_of_a_run(path: Location) -> dict[str, Any] | None:
    """None of what `convert from-hf` makes: it has nothing to go on from."""
    meta = read_meta(path)
    return meta if FullReader(path, verified=True).keys("exp_avg/") else None
