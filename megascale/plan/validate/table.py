"""`megascale plan --validate`: what was predicted beside what was measured, as text or JSON.

Every row stands with its error; then each group's mean, worst, bias, trend with the number of
devices, order of pairs and regret; Table 3 rung by rung; what was fitted on what; other choices of
what the papers leave open; and the targets. Nothing in it is measured here but our own rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megascale.plan.validate.campaign import Campaign, Group, run_campaign
from megascale.plan.validate.fit import BOUNDS, SEED, fitted_models
from megascale.plan.validate.scores import Scores, scores
from megascale.plan.validate.targets import SHOWN, Target, targets

INTRODUCTION = (
    "Predicted, never measured: every figure of the column 'predicted'. Errors are predicted over "
    "measured less one."
)


def start_validation(data: Path | None, *, as_json: bool) -> str:
    """What the verb prints. Raises ConfigError where `data` is bad."""
    campaign = run_campaign(data)
    if as_json:
        return json.dumps(document(campaign), indent=2)
    return text(campaign, data)


def text(campaign: Campaign, data: Path | None) -> str:
    """For people."""
    lines = [INTRODUCTION, ""]
    for group in campaign.groups:
        lines += [*_group_lines(group), ""]
    lines += [*_ladder_lines(campaign), "", *_memory_lines(campaign)]
    lines += [*_swept_lines(campaign), "", *_fitted_lines(campaign), ""]
    lines += _target_lines(targets(campaign))
    if data is None:
        lines += ["", "vTrain's and MosaicML's rows: --data FILE, a CSV of measured runs"]
    for reason, count in campaign.left_out.most_common():
        lines.append(f"left out: {count} rows {reason}")
    return "\n".join(lines)


def _group_lines(group: Group) -> list[str]:
    what = "a number was fitted with these rows in view" if group.is_fitted else "held out"
    rows = [["model", "case", "GPUs", "measured s", "predicted s", "error"]]
    for p in group.predicted:
        row = p.row
        rows.append(
            [
                row.model,
                row.label,
                str(row.gpus),
                f"{row.measured_s:.2f}",
                f"{p.seconds:.2f}",
                f"{100 * p.error:+.1f} %",
            ]
        )
    sources = dict.fromkeys(p.row.source.split(",")[0] for p in group.predicted)
    title = f"{group.name} ({what}; {', '.join(list(sources)[:2])})"
    return [title, *_table(rows), f"  {_summary(scores(group.predicted))}"]


def _summary(found: Scores) -> str:
    parts = [
        f"{found.count} rows: mean {found.mean:.2%}, worst {found.worst:+.1%}",
        f"bias {found.bias:+.1%}",
    ]
    if found.trend is not None:
        parts.append(f"{100 * found.trend:+.2f} % for each doubling of GPUs")
    if found.order is not None:
        parts.append(f"{found.order:.1%} of pairs in the right order")
    if found.regret is not None:
        parts.append(f"regret {found.regret:.2%}")
    return ", ".join(parts)


def _ladder_lines(campaign: Campaign) -> list[str]:
    """Beside the prediction, that for a device whose links are two thirds as fast."""
    rungs, slower = campaign.table3, campaign.table3_slower_links
    rows = [["rung", "MFU printed", "predicted", "gain printed", "predicted", "slower links"]]
    for place, p in enumerate(rungs):
        gains = ["", "", ""]
        if place:
            printed = p.measured_mfu - rungs[place - 1].measured_mfu
            both = [of[place].mfu - of[place - 1].mfu for of in (rungs, slower)]
            gains = [_points(gain) for gain in (printed, *both)]
        rows.append([p.row.label, f"{p.measured_mfu:.1%}", f"{p.mfu:.1%}", *gains])
    total = rungs[-1].measured_mfu - rungs[0].measured_mfu
    sums = [of[-1].mfu - of[0].mfu for of in (rungs, slower)]
    rows.append(["sum", "", "", *(_points(gain) for gain in (total, *sums))])
    title = "Table 3, rung by rung (nothing fitted on it), points of MFU"
    return [f"{title}; slower links: NVLink of 200 GB/s a direction", *_table(rows)]


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _memory_lines(campaign: Campaign) -> list[str]:
    if not campaign.memory:
        return []
    errors = [check.error for check in campaign.memory]
    worst = max(campaign.memory, key=lambda check: abs(check.error))
    mean = sum(map(abs, errors)) / len(errors)
    return [
        (
            f"peak memory of {len(errors)} own runs: mean {mean:.2%}, worst {worst.error:+.2%} "
            f"({worst.row.model}, {worst.row.label})"
        ),
        "",
    ]


def _swept_lines(campaign: Campaign) -> list[str]:
    lines = ["Table 2 under other choices of what the paper leaves open, the constant fitted anew"]
    for name, groups in campaign.swept.items():
        if groups is None:
            lines.append(f"  {name}: not legal in every row")
            continue
        means = [scores(group.predicted) for group in groups]
        lines.append(
            f"  {name}: Megatron-LM {means[0].mean:.2%}, MegaScale {means[1].mean:.2%} "
            f"(worst {means[1].worst:+.1%})"
        )
    return lines


def _fitted_lines(campaign: Campaign) -> list[str]:
    models = " and ".join(sorted(fitted_models()))
    return [
        f"fitted: {', '.join(BOUNDS)}",
        f"  of the A100, on Korthikanti's 22B and 175B and on vTrain's {models}; seed {SEED}",
        f"fitted: {campaign.fixed_s:.2f} s a step on the paper's cluster",
        "  on Table 2's eight Megatron-LM rows",
        "not fitted: slow nodes (as printed), late ranks, MegaScale's rows, Table 3, Figure 9",
    ]


def _target_lines(lines: Sequence[Target]) -> list[str]:
    rows = [["target", "reached", "at most", "met", "public bar", "fitted"]]
    for line in lines:
        shown = SHOWN[line.unit]
        met = "yes" if line.met else "NO"
        rows.append([line.name, shown(line.value), shown(line.limit), met, line.bar, line.fitted])
    return _table(rows, left=(0, 4, 5))


def _table(rows: list[list[str]], left: tuple[int, ...] = (0, 1)) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def document(campaign: Campaign) -> dict[str, Any]:
    """For programs."""
    return {
        "predicted": True,
        "fixed_s": campaign.fixed_s,
        "fitted": {
            "a100": list(BOUNDS),
            "korthikanti": ["gpt-22b", "gpt-175b"],
            "vtrain": sorted(fitted_models()),
            "seed": SEED,
        },
        "groups": [_group_document(group) for group in campaign.groups],
        "table3": [
            {
                "rung": p.row.label,
                "mfu": p.mfu,
                "printed_mfu": p.measured_mfu,
                "gain": None if below is None else p.mfu - below.mfu,
                "printed_gain": None if below is None else p.measured_mfu - below.measured_mfu,
            }
            for below, p in pairwise([None, *campaign.table3])
            if p is not None
        ],
        "memory": [
            {"label": c.row.label, "model": c.row.model, "predicted_gb": c.predicted_gb,
             "measured_gb": c.row.memory_gb, "error": c.error}
            for c in campaign.memory
        ],
        "swept": {
            name: None if groups is None else [_scores_document(g) for g in groups]
            for name, groups in campaign.swept.items()
        },
        "targets": [
            {"name": t.name, "value": t.value, "limit": t.limit, "unit": t.unit, "met": t.met,
             "bar": t.bar, "fitted": t.fitted}
            for t in targets(campaign)
        ],
        "left_out": dict(campaign.left_out),
    }  # fmt: skip


def _group_document(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "fitted": group.is_fitted,
        "scores": _scores_document(group),
        "rows": [
            {
                "set": p.row.set,
                "system": p.row.system,
                "model": p.row.model,
                "label": p.row.label,
                "gpus": p.row.gpus,
                "measured_s": p.row.measured_s,
                "predicted_s": p.seconds,
                "error": p.error,
                "source": p.row.source,
            }
            for p in group.predicted
        ],
    }


def _scores_document(group: Group) -> dict[str, Any]:
    return vars(scores(group.predicted)) | {"group": group.name}
