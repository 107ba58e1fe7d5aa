"""Chooses the form of an operator for a shape class: measured once, kept, equal on all ranks.

The candidates always include the backend's collective with cuBLAS and torch's operators, so what
is chosen is never worse than they are by more than the noise of the measurement. A candidate is
checked by value against the reference before it is timed; one that is wrong, or that cannot run, is
excluded with a warning that names it.

Two ways. `tune="cache"` measures nothing: the entry of the cache, else the default rule.
`tune="now"` measures where there is no entry, which takes some tens of calls of every candidate and
is collective; do it before the timed steps and never while a graph is captured.

Invariant: the choice is the same on all ranks. The cache is rank 0's, sent to the group when the
tuner is made; times are the maximum over ranks before they are compared; ties go by name; a
candidate that is wrong on one rank is wrong on all.

Measuring takes many turns of the arena. A gather that was started before is ended first; a gathered
input of an earlier call is not valid afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from megascale.errors import FluxError
from megascale.flux.arena import Arena
from megascale.flux.default_rule import OTHERWISE, default_form
from megascale.flux.symmetric.all_gather import keep_started
from megascale.flux.timing import (
    Probe,
    Timer,
    interleave,
    medians,
    slowest_rank,
    vote_device,
)
from megascale.flux.tuning_cache import Choice, Key, TuningCache
from megascale.flux.values import mismatch, tensors_of

logger = logging.getLogger(__name__)

Tune = Literal["cache", "now"]
REFERENCE = "nccl"
FAR_BEHIND = 1.5  # times the best, in the better of two rounds


@dataclass(frozen=True)
class Candidate:
    """A form with a configuration, bound to the arguments of the call that is tuned.

    run  makes the call; gives its tensors (in tuples or lists), which later calls may overwrite
    """

    name: str
    config: object | None
    run: Callable[[], object]

    @property
    def plain_config(self) -> dict[str, Any] | None:
        """The configuration as it stands in the cache. An option that is None is left out: an entry
        from before there was such an option means the same."""
        if self.config is None:
            return None
        values = asdict(self.config)  # type: ignore[call-overload] # an instance of some dataclass
        return {name: value for name, value in values.items() if value is not None}

    @property
    def label(self) -> str:
        """Name and configuration in a line; orders candidates that are equally fast."""
        values = self.plain_config
        if not values:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in values.items())})"


class Tuner:
    """The choices of one group. Making it is collective: rank 0's cache is sent to all."""

    def __init__(
        self,
        cache: TuningCache,
        group: dist.ProcessGroup | None,
        timer: Timer,
        *,
        tune: Tune = "cache",
        num_rounds: int = 5,
        arena: Arena | None = None,
    ) -> None:
        """
        arena  through which candidates exchange; reset after one of them was excluded, since it may
               have left flags there, and turns that the ranks do not agree about
        """
        self.tune = tune
        self._cache = cache
        self._group = group
        self._timer = timer
        self._num_rounds = num_rounds
        self._arena = arena
        self._known: dict[Key, Choice] = {}
        self._warned: set[Key] = set()
        if group is not None and group.size() > 1:
            cache.replace(_of_rank_0(cache.entries(), group))

    def known(self, key: Key) -> Choice | None:
        """What `choose` answered for this key before; a dictionary look-up."""
        return self._known.get(key)

    def choose(
        self, key: Key, candidates: Sequence[Candidate], tune: Tune | None = None
    ) -> Candidate:
        """The candidate for this shape class; of several configurations of a form, its entry's.

        tune  instead of the tuner's own way. With "now" and without an entry every rank of the
              group must call this with the same candidates.
        Raises FluxError where it would have to measure while a graph is captured.
        """
        choice = self._cache.get(key)
        if choice is not None:
            found = _matching(choice, candidates)
            if found is not None:
                self._known[key] = choice
                return found
            self._warn_once(key, choice)
        if (tune or self.tune) == "now":
            return self._measure(key, candidates)
        return self._by_rule(key, candidates)

    def _warn_once(self, key: Key, choice: Choice) -> None:
        if key not in self._warned:
            self._warned.add(key)
            what = f"{choice.form} {choice.config or ''}".rstrip()
            logger.warning("tuning cache: %s is not offered for %s; tune it again", what, key)

    def _by_rule(self, key: Key, candidates: Sequence[Candidate]) -> Candidate:
        names = (default_form(key.problem, key.mode), *OTHERWISE)
        found = next((c for name in names for c in candidates if c.name == name), None)
        assert found is not None, (names, [c.label for c in candidates])
        self._known[key] = Choice(found.name, found.plain_config)
        return found

    def _measure(self, key: Key, candidates: Sequence[Candidate]) -> Candidate:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise FluxError(
                f'tune="now" would measure {key.op} while a CUDA graph is captured; call it once '
                'before the capture, or use tune="cache"'
            )
        if self._arena is not None:
            keep_started(self._arena)
        by_label = {c.label: c for c in sorted(candidates, key=lambda c: c.label)}
        assert len(by_label) == len(candidates), [c.label for c in candidates]
        ms = self._times(self._probes(self._right(by_label)))
        best = by_label[min(ms, key=lambda label: (ms[label], label))]
        choice = Choice(best.name, best.plain_config, ms)
        self._known[key] = choice
        self._cache.put(key, choice)
        if self._group is None or self._group.rank() == 0:
            self._save()
        return best

    def _save(self) -> None:
        """A file that cannot be written is a warning: the peers have their choice and go on."""
        try:
            self._cache.save()
        except FluxError as error:
            logger.warning("%s. The choice holds for this process", error)

    def _times(self, probes: dict[str, Probe]) -> dict[str, float]:
        """Milliseconds by label. Who is far behind twice is not asked again."""
        samples = interleave(probes, 2)
        best = slowest_rank({label: min(times) for label, times in samples.items()}, self._group)
        limit = FAR_BEHIND * min(best.values())
        finalists = {label: probes[label] for label in probes if best[label] <= limit}
        for label, times in interleave(finalists, self._num_rounds - 2).items():
            samples[label] += times
        return medians(samples, self._group)

    def _right(self, by_label: dict[str, Candidate]) -> dict[str, Candidate]:
        """The candidates whose values agree with the reference's, and the reference itself."""
        reference = by_label[REFERENCE]
        wanted = [tensor.clone() for tensor in tensors_of(reference.run())]
        right = {REFERENCE: reference}
        for label, candidate in by_label.items():
            if label == REFERENCE:
                continue
            try:
                problem = mismatch(tensors_of(candidate.run()), wanted)
            except Exception as error:  # noqa: BLE001 - a candidate is tried: its failure is its end
                problem = f"fails: {error}"
            if self._agreed(label, problem):
                right[label] = candidate
        return dict(sorted(right.items()))

    def _probes(self, candidates: dict[str, Candidate]) -> dict[str, Probe]:
        """Warm calls, ready to be timed; without those that cannot be (no capture, say)."""
        probes: dict[str, Probe] = {}
        for label, candidate in candidates.items():
            problem = ""
            try:
                probes[label] = self._timer.prepare(candidate.run)
            except Exception as error:
                if label == REFERENCE:
                    raise
                problem = f"cannot be timed: {error}"
            if not self._agreed(label, problem):
                probes.pop(label, None)
        return probes

    def _agreed(self, label: str, problem: str) -> bool:
        """Whether the candidate stays; where it does not, what it left is cleared away."""
        stays = agreed(label, problem, self._group)
        if not stays and self._arena is not None:
            self._arena.reset()
        return stays


def agreed(label: str, problem: str, group: dist.ProcessGroup | None) -> bool:
    """Whether no rank has a `problem` with this method. Collective; a warning says which it is."""
    if problem:
        logger.warning("%s is excluded: %s", label, problem)
    return slowest_rank({label: float(bool(problem))}, group)[label] == 0.0


def _matching(choice: Choice, candidates: Sequence[Candidate]) -> Candidate | None:
    for candidate in candidates:
        if candidate.name == choice.form and candidate.plain_config == choice.config:
            return candidate
    return None


def _of_rank_0(
    entries: list[tuple[Key, Choice]], group: dist.ProcessGroup
) -> list[tuple[Key, Choice]]:
    shared: list[Any] = [entries]
    dist.broadcast_object_list(shared, group=group, group_src=0, device=vote_device(group))
    received: list[tuple[Key, Choice]] = shared[0]
    return received
