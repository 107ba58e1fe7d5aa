"""Write `megascale/plan/search/residuals.toml`: what a plan's interval comes from.

    python -m tools.residuals --data FILE    the CSV of `megascale plan --validate --data`

Every row of the validation that nothing was fitted on counts, by the device it ran on, but for
ZeRO-3, which is no layout that a plan proposes. Without the CSV there are fewer rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from megascale.plan.search.confidence import device_row, summary
from megascale.plan.validate.campaign import run_campaign
from megascale.plan.validate.scores import Predicted
from tools.blocks import ROOT

FILE = ROOT / "megascale" / "plan" / "search" / "residuals.toml"
LEAST_ROWS = 10  # of fewer, nine of ten say nothing
HEAD = """\
# By device: of steps that were measured on it, see confidence.py. share: nine of ten are within;
# largest: devices of the largest of them. Rows that nothing was fitted on, as `megascale plan
# --validate --data` shows them. Written by tools/residuals.py.
"""


def residuals(data: Path | None) -> dict[str, dict[str, float | str]]:
    """By device, of the rows that nothing was fitted on."""
    held_out: dict[str, list[Predicted]] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    for group in run_campaign(data).groups:
        if group.is_fitted:
            continue
        for predicted in group.predicted:
            if predicted.row.case.layout.zero_stage == 3:
                continue
            device = device_row(predicted.row.cluster)
            held_out[device].append(predicted)
            if predicted.row.set not in names[device]:
                names[device].append(predicted.row.set)
    return {
        device: {
            **summary([p.error for p in rows], [p.row.gpus for p in rows]),
            "source": f"measured steps that nothing was fitted on ({', '.join(names[device])})",
        }
        for device, rows in held_out.items()
        if len(rows) >= LEAST_ROWS
    }


def render(found: dict[str, dict[str, float | str]]) -> str:
    """As TOML."""
    tables = [
        f'["{device}"]\n'
        f"share = {values['share']:.3f}\nbias = {values['bias']:.3f}\n"
        f"num_rows = {values['num_rows']}\nlargest = {values['largest']}\n"
        f'source = "{values["source"]}"\n'
        for device, values in sorted(found.items())
    ]
    return "\n".join([HEAD, *tables])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=None)
    found = residuals(parser.parse_args().data)
    FILE.write_text(render(found), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()
