"""`megascale trace`: a timeline of a run's newest steps, or of those that are asked for."""

from __future__ import annotations

from pathlib import Path

from megascale.errors import ConfigError
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.shown import counted
from megascale.telemetry.store.run import open_run
from megascale.telemetry.timeline.drawing import Drawn, draw_timeline
from megascale.telemetry.timeline.selection import Selection
from megascale.telemetry.timeline.stored import StoredRun

# Two of them have their spans, as telemetry.span_interval comes.
DEFAULT_STEPS = 20

_MOST_NAMED = 16


def trace_run(
    run_dir: Path,
    output: Path,
    *,
    first: int | None,
    last: int | None,
    selection: Selection,
    align: bool,
) -> list[str]:
    """Write the timeline to `output`; sentences about what is in it, and what is not."""
    if not output.name.endswith((".json", ".json.gz")):
        raise ConfigError(
            f"the trace was to be written to {output}; its name must end in .json, or in .json.gz "
            "to be compressed (viewers open both)"
        )
    with open_run(run_dir) as run:
        bounds = run.bounds(Window(first, last), DEFAULT_STEPS)
        drawn = draw_timeline(StoredRun(run, *bounds), output, selection, align=align)
        return [*_said(drawn, output, bounds), *(f"note: {text}" for text in run.caveats())]


def _said(drawn: Drawn, output: Path, bounds: tuple[int, int]) -> list[str]:
    counts = drawn.arrows
    first, last = bounds
    written = (
        f"{output}: {counted(len(drawn.ranks) - len(drawn.missing), 'rank')}, steps {first} to "
        f"{last}, "
        f"{counted(drawn.num_spans, 'span')}, {counted(counts.arrows, 'arrow')}; open it in "
        "ui.perfetto.dev or chrome://tracing"
    )
    lines = [written, f"note: {drawn.alignment}"]
    if not drawn.num_spans:
        lines.append(
            "note: none of these steps has its spans: they are recorded every "
            "telemetry.span_interval steps; ask for more steps, or `megascale profile RUN --what "
            "spans` while the run lives"
        )
    if drawn.missing:
        more = "" if len(drawn.missing) <= _MOST_NAMED else ", ..."
        names = ", ".join(map(str, drawn.missing[:_MOST_NAMED]))
        lines.append(f"note: {counted(len(drawn.missing), 'rank')} recorded nothing: {names}{more}")
    if counts.lost:
        lines.append(
            f"note: {counts.lost} sends, receives and members of collectives have no arrow, "
            "because their other end was not recorded"
        )
    if counts.against_time:
        lines.append(
            f"note: {counts.against_time} transfers have no arrow, because they would be used "
            "before they were sent: the clocks of their hosts are apart"
        )
    return lines
