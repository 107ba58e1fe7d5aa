"""The training loop of one rank.

The host runs one step ahead of the device: the values of step k (loss, norm, whether its update was
masked, whether anybody wants to stop) are read while step k + 1 computes. Decisions follow from
values that are equal on all ranks, so all ranks save, stop or roll back at the same step without a
message. Before a checkpoint or a validation the loop catches up, because those wait anyway.

`training.run_ahead = false` and `training.gc = "automatic"` are what older loops did, for the
ladder: the host reads each step's loss before it launches the next, and Python collects when it
likes.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from functools import partial

from megascale.checkpoint.agree import waits_in
from megascale.checkpoint.manifest import list_checkpoints
from megascale.errors import NumericalError
from megascale.optim import learning_rate
from megascale.telemetry.recorder import Recorder
from megascale.topology import Coordinates
from megascale.train.assemble import Assembly
from megascale.train.batches import DeviceBatches
from megascale.train.corpus import tokenizer_files
from megascale.train.feed import Feed, open_feed
from megascale.train.host import collections_by, runs_ahead
from megascale.train.launch import stopped_by_signals
from megascale.train.nonfinite import NonfiniteSteps, first_bad_name
from megascale.train.persistence import Persistence
from megascale.train.replicas import check_replicas
from megascale.train.report import Reporter, StepValues, resources
from megascale.train.resume import changed_keys, describe_changes, refuse_another_optimizer
from megascale.train.run_folder import RunFolder
from megascale.train.state import Progress
from megascale.train.step import StepOutcome, train_step
from megascale.train.validation import compare_with_unigrams, held_out, validate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    """A step that was launched and whose values were not read yet."""

    outcome: StepOutcome
    step: int
    lr: float
    num_samples: int
    consumed_samples: int


class Loop:
    """State of a running job on one rank."""

    def __init__(self, assembly: Assembly, folder: RunFolder, recorder: Recorder) -> None:
        self.assembly = assembly
        self.config = assembly.config
        self.folder = folder
        self.recorder = recorder
        self.progress = Progress()
        self.persistence = Persistence(assembly, folder, recorder)
        self.reporter = Reporter(assembly, folder)
        self._pending: _Pending | None = None
        self._on_device = assembly.device.type == "cuda"
        self._runs_ahead = runs_ahead(self.config.training, assembly.device)
        self._nonfinite_steps = NonfiniteSteps(self.config.training)
        self._stop_asked = False  # by a signal to this rank
        self._stopping = False  # agreed by all ranks
        self._feed: Feed | None = None
        self._batches: DeviceBatches | None = None

    def run(self, *, resume: bool) -> None:
        """Train from the start, from a checkpoint (`resume`), or from given weights."""
        wait = partial(self.recorder.span, "agreement", op="all_gather", group="world", host=True)
        try:
            with waits_in(wait):
                self._feed = open_feed(self.config, self.assembly.mesh, self._place)
                if not self._begin(resume=resume):
                    return
                self._open_loader()
                with stopped_by_signals(self._ask_to_stop), collections_by(self.config.training.gc):
                    self.reporter.restart_clock()
                    self._train()
                    self._finish()
        finally:
            self._close_loader()
            if self._feed is not None:
                self._feed.close()
            self.persistence.close()
            self.reporter.close()

    def _begin(self, *, resume: bool) -> bool:
        """Restore, and record this start. False where all steps are done: nothing is written."""
        changed = changed_keys(self.folder.config_file, self.config) if resume else {}
        saved = list_checkpoints(self.folder.checkpoints).committed
        if resume and (saved or self.config.checkpoint.remote):
            refuse_another_optimizer(changed)
        self.progress = self.persistence.restore(resume=resume)
        step, steps = self.progress.step, self.config.training.steps
        if resume and step >= steps:
            logger.info("nothing to do: the run is at step %d of %d", step, steps)
            return False
        if self.assembly.is_writer:
            if changed:
                logger.info("changed since the last start: %s", describe_changes(changed))
            self.folder.open(self.config, tokenizer_files(self.config))
        return True

    def _train(self) -> None:
        while self.progress.step < self.config.training.steps and not self._stopping:
            previous, self._pending = self._pending, None
            launched = self._launch()
            if previous is not None and not self._settle(previous):
                continue  # rolled back: the step launched meanwhile is void
            self._pending = launched
            if not self._is_boundary() or self._catch_up():
                self._between_steps()

    def _finish(self) -> None:
        self._catch_up()
        self.recorder.incident("resources", **resources(self.assembly))
        checkpoint = self.config.checkpoint
        if self._stopping and checkpoint.enable:
            logger.info("asked to stop: saving step %d", self.progress.step)
        elif self._stopping:
            logger.info(
                "asked to stop at step %d: nothing is saved (checkpoint.enable = false)",
                self.progress.step,
            )
        elif self.config.validation.interval:
            compare_with_unigrams(self.config, self._validate())
        if checkpoint.enable and (checkpoint.save_at_end or self._stopping):
            self.persistence.save(self.progress, required=True)
        self.persistence.finish()

    # ------------------------------------------------------------ one step

    def _launch(self) -> _Pending:
        """Put the next step on the device."""
        progress, config = self.progress, self.config
        assert self._batches is not None
        lr = learning_rate(
            progress.step,
            config.lr_scheduler,
            lr=config.optimizer.lr,
            total_steps=config.training.steps,
        )
        is_last = progress.step + 1 == config.training.steps
        with self.recorder.step(progress.step + 1):
            batch = next(self._batches)
            assert batch.first_sample == progress.consumed_samples, (batch.first_sample, progress)
            outcome = train_step(
                self.assembly,
                batch.batches,
                global_batch=batch.num_samples,
                lr=lr,
                wants_stop=self._stop_asked,
                vote=self.persistence.vote(),
                after_backward=None if is_last else self._batches.prefetch,
                before_update=self.persistence.before_update,
            )
        self.reporter.data_wait_s += self._batches.take_waited_s()
        progress.step += 1
        progress.consumed_samples += batch.num_samples
        return _Pending(outcome, progress.step, lr, batch.num_samples, progress.consumed_samples)

    def _settle(self, pending: _Pending) -> bool:
        """Read a step's values, report them, act on them. False where the run was rolled back."""
        values = _read(pending)
        self.recorder.reached(pending.outcome.summary.moment)
        self.reporter.finished(values, pending.outcome.summary.moment)
        self._stopping = self._stopping or values.stop_votes > 0
        if not values.masked:
            self._nonfinite_steps.passed(values.step)
        elif not self._nonfinite(pending, values):
            return False
        self.persistence.settled(values.step, masked=values.masked, vote=values.tier_votes)
        return True

    def _catch_up(self) -> bool:
        """Settle the step in flight, if any."""
        pending, self._pending = self._pending, None
        return pending is None or self._settle(pending)

    def _nonfinite(self, pending: _Pending, values: StepValues) -> bool:
        """The update was masked on the device; now the policy. Same path on all ranks."""
        own = pending.outcome.update.name_of_worst()
        name = first_bad_name(own, self.assembly.mesh.world_size)
        self.recorder.incident("nonfinite", step=values.step, parameter=name)
        try:
            verdict = self._nonfinite_steps.verdict(values.step, name)
        except NumericalError:
            self.persistence.finish()  # what is being written is of good steps
            raise
        if verdict == "skip":
            return True
        restored = self.persistence.roll_back()
        self.progress = Progress(restored.step, values.consumed_samples)
        self._close_loader()
        self._open_loader()
        self.reporter.restart_clock()
        return False

    # ------------------------------------------------------------ between steps

    def _is_boundary(self) -> bool:
        """Must the step's values be read before the next step?"""
        step, config = self.progress.step, self.config
        if not self._runs_ahead or step == config.training.steps:  # the last may be rolled back
            return True
        return self._is_interval()

    def _is_interval(self) -> bool:
        """Is there a validation, a comparison, or a checkpoint that is waited for?"""
        step, config = self.progress.step, self.config
        intervals = (config.validation.interval, config.debug.check_replicas_interval)
        is_multiple = any(interval and step % interval == 0 for interval in intervals)
        return is_multiple or self.persistence.waits_after(step)

    def _between_steps(self) -> None:
        step, config = self.progress.step, self.config
        if config.training.gc == "agreed" and step % config.training.gc_freq == 0:
            with self.recorder.span("gc", host=True):
                gc.collect(1)
        self.persistence.keep(self.progress, is_settled=self._pending is None)
        waits = self.persistence.waits_after(step)  # perhaps `keep` found no memory to write from
        if waits and not self._catch_up():
            return  # rolled back
        if self._pending is not None:
            return  # no boundary
        if self._on_device and (self._runs_ahead or self._is_interval()):
            self.recorder.anchor()  # the device is idle: its clock is compared with the host's
        every = config.debug.check_replicas_interval
        if every and step % every == 0:
            check_replicas(self.assembly, f"step {step}", self.recorder, step, step - every)
        every = config.validation.interval
        if every and step % every == 0 and step < config.training.steps:  # else in `_finish`
            self._validate()
        if waits:
            self.persistence.save(self.progress, required=False)
            self.reporter.restart_clock()

    def _validate(self) -> float:
        assert self._feed is not None
        source = self._feed.held_out()
        parts = held_out(self.config, self.assembly.mesh, self._place, source)
        with self.recorder.span("validation"):
            loss, of_parts = validate(self.assembly, parts)
        self.reporter.validated(self.progress.step, loss, of_parts)
        return loss

    @property
    def _place(self) -> Coordinates:
        return self.assembly.groups.coordinates

    def _open_loader(self) -> None:
        assert self._feed is not None
        self._batches = DeviceBatches(
            self._feed.steps(self.progress.consumed_samples),
            self.assembly.program,
            ahead=self.config.data.prefetch > 0,
            span=self.recorder.span,
        )

    def _close_loader(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _ask_to_stop(self) -> None:
        """All ranks save the same step and return."""
        self._stop_asked = True


def _read(pending: _Pending) -> StepValues:
    """Device to host; waits until the step has run, and for nothing launched after it."""
    loss, grad_norm, masked, stop_votes, tier_votes = pending.outcome.summary.read()
    return StepValues(
        step=pending.step,
        loss=loss,
        grad_norm=grad_norm,
        lr=pending.lr,
        num_samples=pending.num_samples,
        consumed_samples=pending.consumed_samples,
        masked=bool(masked),
        stop_votes=int(stop_votes),
        tier_votes=int(tier_votes),
    )
