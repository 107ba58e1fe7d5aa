"""The arithmetic of the waterfall: from the events of a rank to milliseconds by class. Pure.

The window of a step reaches from its begin to the next one's, so that windows add up to the run.
Every instant of it belongs to the innermost span that is open on the compute stream, and through it
to the nearest class: that of the span itself, else of the one around it. So the classes and what
nobody claims are the window, always; nothing is scaled to fit.

Then four corrections move time from one class to another, and are called derived for it:
* TP: a linear whose communication runs inside it takes longer than the same GEMM alone
  (`alone.py`); what is above is exposed communication.
* DP: an operator that runs while gradients or parameters travel may take longer than the same one
  of a micro-batch in which nothing travels; what is above is exposed communication.
* bubble: of the time that a stage waits for its neighbours, what the schedule alone makes it wait
  (`bubble.py`). The rest is exposed transfers.
* GEMM: FLOPs over the device's peak are ideal, the rest is inefficiency.

Host: where the device passed a mark and the next one was not launched yet, it waited for the host.
On a CPU host and device are one, and only waiting for data counts as the host's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megascale.events import Header, Span, Step

CLASSES = (
    *("gemm_ideal", "gemm_inefficiency", "attention", "elementwise"),
    *("tp", "pp", "dp", "bubble", "optimizer", "host", "residual"),
)
# What a span is that does not say it itself.
_OF_NAME = {
    "pp_wait": "pp",
    "pp_finish": "pp",
    "send": "pp",
    "recv": "pp",
    "optimizer": "optimizer",
    "data_wait": "host",
    "gc": "host",
    "backward_weight": "gemm",  # deferred: what is not bracketed in it are weight gradients
}
_CUT = -1  # where the step ends, and the window: no span's
_COMPUTE = ("gemm", "attention", "elementwise")
Key = tuple[str, str, str]
"""(class, operator, name of its span: op_forward or op_backward)."""


@dataclass
class StepTimes:
    """One step of one rank before the corrections, in ns.

    selfs     of every operator's call: its key, when it began, its own time
    residual  what no class claims, by the span around it
    """

    window_ns: int
    by_class: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    residual: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    selfs: list[tuple[Key, int, int]] = field(default_factory=list)

    def by_key(self) -> dict[Key, tuple[int, int]]:
        """(time, number of calls) of each operator."""
        found: dict[Key, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for key, _, own_ns in self.selfs:
            total, count = found[key]
            found[key] = total + own_ns, count + 1
        return dict(found)


def names_of(header: Header) -> dict[str, str]:
    """The class of spans that do not say theirs, by name, in this layout.

    What all ranks do together waits for the outermost axis. Without data ranks the synchronisation
    of gradients is the sum over tensor ranks, and parameters are only copied.
    """
    outermost = "pp" if header.pipeline > 1 else "dp" if header.data > 1 else "tp"
    return {
        **_OF_NAME,
        "world_sums": outermost,
        "grad_sync": "dp" if header.data > 1 else "tp" if header.tensor > 1 else "optimizer",
        "param_gather": "dp" if header.data > 1 else "optimizer",
    }


def times_of(step: Step, end_ns: int, spans: Iterable[Span], names: Mapping[str, str]) -> StepTimes:
    """Cut the window [step.t0_ns, end_ns) by the spans of the step's clock."""
    times = StepTimes(end_ns - step.t0_ns)
    ordered = sorted(
        (s for s in spans if s.clock == step.clock and s.dur_ns > 0),
        key=lambda s: (s.t0_ns, -s.dur_ns),
    )
    own = [0] * len(ordered)
    points = sorted(
        [(s.t0_ns, 1, i) for i, s in enumerate(ordered)]
        + [(s.t0_ns + s.dur_ns, 0, i) for i, s in enumerate(ordered)]
    )
    stack: list[int] = []
    at = step.t0_ns
    cut = [(min(step.t0_ns + step.dur_ns, end_ns), 0, _CUT), (end_ns, 0, _CUT)]
    for time_ns, starts, i in sorted(points + cut):
        now = min(max(time_ns, at), end_ns)
        starving = ordered[i].issued_ns if starts else None
        _charge(times, own, ordered, stack, at, now, starving, names, step)
        at = now
        if starts:
            stack.append(i)
        elif i != _CUT:
            stack.remove(i)
    for span, own_ns in zip(ordered, own, strict=True):
        if span.work in _COMPUTE or span.name == "backward_weight":
            key = (span.work or names[span.name], span.op or span.name, span.name)
            times.selfs.append((key, span.t0_ns, own_ns))
    return times


def _charge(
    times: StepTimes,
    own: list[int],
    spans: Sequence[Span],
    stack: Sequence[int],
    start_ns: int,
    end_ns: int,
    next_issued_ns: int | None,
    names: Mapping[str, str],
    step: Step,
) -> None:
    """Give [start_ns, end_ns) to who is innermost, and of it to the host what it kept waiting."""
    left = end_ns - start_ns
    if left <= 0:
        return
    if next_issued_ns is not None:
        waited = min(max(next_issued_ns - start_ns, 0), left)
        times.by_class["host"] += waited
        left -= waited
    if not stack:
        between_steps = start_ns >= step.t0_ns + step.dur_ns
        times.by_class["host" if between_steps else "residual"] += left
        if not between_steps:
            times.residual["step"] += left
        return
    work, giving = None, stack[-1]
    for i in reversed(stack):
        work, giving = spans[i].work or names.get(spans[i].name), i
        if work is not None:
            break
    own[giving] += left
    times.by_class[work or "residual"] += left
    if work is None:
        times.residual[spans[stack[-1]].name] += left


# ---------------------------------------------------------------- corrections


def exposed_tp_ns(
    by_key: Mapping[Key, tuple[int, int]], alone_ns: Mapping[str, Mapping[str, int]]
) -> int:
    """What linears take above the same GEMMs alone (`{operator: {span name: ns}}`)."""
    above = 0
    for (work, operator, name), (total_ns, count) in by_key.items():
        if work == "gemm" and name in alone_ns.get(operator, {}):
            above += total_ns - count * alone_ns[operator][name]
    return max(above, 0)


def slowed_ns(times: StepTimes, travelling: Sequence[tuple[int, int]]) -> dict[str, int]:
    """By class of compute: what operators take longer while something travels."""
    beside: dict[Key, list[int]] = defaultdict(list)
    apart: dict[Key, list[int]] = defaultdict(list)
    for key, t0_ns, own_ns in times.selfs:
        is_beside = any(first <= t0_ns < last for first, last in travelling)
        (beside if is_beside else apart)[key].append(own_ns)
    above: dict[str, int] = defaultdict(int)
    for key, values in beside.items():
        if len(apart[key]) >= 2:
            above[key[0]] += sum(values) - round(len(values) * statistics.median(apart[key]))
    return {work: max(ns, 0) for work, ns in above.items()}


def corrected(
    times: StepTimes,
    *,
    gemm_ideal_ns: float,
    alone_ns: Mapping[str, Mapping[str, int]],
    travelling: Sequence[tuple[int, int]],
    bubble_ns: int,
) -> dict[str, float]:
    """ns of every class of `CLASSES`, in order; their sum is the window."""
    raw = {work: float(ns) for work, ns in times.by_class.items()}
    slowed = slowed_ns(times, travelling)
    tp = exposed_tp_ns(times.by_key(), alone_ns)
    tp = max(0, tp - slowed.get("gemm", 0)) if alone_ns else 0
    gemm = raw.get("gemm", 0.0) - slowed.get("gemm", 0) - tp
    bubble = min(float(bubble_ns), raw.get("pp", 0.0))
    found = {
        "gemm_ideal": min(gemm_ideal_ns, gemm),
        "gemm_inefficiency": max(gemm - gemm_ideal_ns, 0.0),
        "attention": raw.get("attention", 0.0) - slowed.get("attention", 0),
        "elementwise": raw.get("elementwise", 0.0) - slowed.get("elementwise", 0),
        "tp": raw.get("tp", 0.0) + tp,
        "pp": raw.get("pp", 0.0) - bubble,
        "dp": raw.get("dp", 0.0) + sum(slowed.values()),
        "bubble": bubble,
        "optimizer": raw.get("optimizer", 0.0),
        "host": raw.get("host", 0.0),
        "residual": raw.get("residual", 0.0),
    }
    return {name: found[name] for name in CLASSES}
