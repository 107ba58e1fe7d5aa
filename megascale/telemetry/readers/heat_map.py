"""The heat map of ranks and phases, and what stands out in it (MegaScale Figure 7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megascale.telemetry.diagnose.summary import SHARE, HeatMap, Outlier, heat_map, single_share
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import asked, host_list
from megascale.telemetry.shown import counted, percent, table
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = 100
_SHOWN = 10
_DIMENSIONS = {
    "rank": "rank",
    "host": "host",
    "tensor": "tensor rank",
    "data": "data rank",
    "pipeline": "pipeline stage",
}


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    means = run.phase_means(first, last)
    kept = asked(means.rank_R, window)
    rank_R = means.rank_R[kept]
    host_R, num_steps = host_list(run, rank_R), means.num_steps_R[kept]
    few = int(np.median(num_steps))
    found = heat_map(rank_R, means.phases, means.mean_ms_RP[kept], run.mesh, host_R, num_steps=few)
    own = [one for one in found.outliers if not one.waits]
    data = {
        "first_step": first,
        "last_step": last,
        **found.as_json(),
        "hosts": list(host_R),
        "tensor_ranks": (rank_R % run.mesh.tensor).tolist(),
        "data_ranks": (rank_R // run.mesh.tensor % run.mesh.data).tolist(),
        "pipeline_stages": (rank_R // (run.mesh.tensor * run.mesh.data)).tolist(),
        "num_steps": num_steps.tolist(),
    }
    caveats = run.caveats()
    if single_share(few) > SHARE:
        caveats.append(
            f"over {counted(few, 'step')} a single pause weighs much: a rank stands out only if it "
            f"is {percent(single_share(few))} slower; ask for more steps"
        )
    return Answer(
        level="notice" if own else "ok",
        summary=_sentence(found, own, first, last),
        data=data,
        lines=_lines(found),
        caveats=caveats,
    )


def _sentence(found: HeatMap, own: Sequence[Outlier], first: int, last: int) -> str:
    where = f"steps {first} to {last}, {counted(len(found.rank_R), 'rank')}"
    if not own:
        return f"no rank, host or group stands out in what it does itself ({where})"
    top = own[0]
    more = len(own) - 1
    others = f"; {more} more below" if more else ""
    return (
        f"{_DIMENSIONS[top.dimension]} {top.value} takes {percent(top.share)} longer in "
        f"{top.phase} than the others ({where}){others}"
    )


def _lines(found: HeatMap) -> list[str]:
    if not found.outliers:
        return []
    rows = [["who", "phase", "longer", "ranks", ""]]
    for one in found.outliers[:_SHOWN]:
        note = "waits for others" if one.waits else ""
        who = f"{_DIMENSIONS[one.dimension]} {one.value}"
        rows.append([who, one.phase, percent(one.share), str(one.num_ranks), note])
    more = len(found.outliers) - _SHOWN
    return [*table(rows), *([f"and {more} more"] if more > 0 else [])]
