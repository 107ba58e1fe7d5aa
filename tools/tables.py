"""Render the tables of results in README and docs from `benchmarks/results/*.jsonl`.

A row is one case measured once (`benchmarks/README.md` has the form). Of a case, the newest row
measured on a clean tree counts; rows of a dirty tree stay in the file and never reach a table.

A page asks for a table by `<!-- table: BENCH key=value ... -->`: the rows of that bench whose case
has these values.

Invariant: the tables are a pure function of the rows. `--check` fails where a page is behind them,
so a number in a table was measured, and nobody typed it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.blocks import ROOT, main

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
Row = dict[str, Any]


def read_rows(bench: str, folder: Path = RESULTS) -> list[Row]:
    """Rows of a bench, in the order of its file. Raises ValueError naming file and line."""
    path = folder / f"{bench}.jsonl"
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(_checked(json.loads(line), bench))
        except (json.JSONDecodeError, KeyError, ValueError) as error:
            raise ValueError(f"{path.name}:{number}: not a result row: {error}") from None
    return rows


def _checked(row: Row, bench: str) -> Row:
    missing = {"bench", "case", "metric", "value", "dirty", "device", "commit", "time"} - row.keys()
    if missing:
        raise ValueError(f"keys {sorted(missing)} are missing")
    if row["bench"] != bench:
        raise ValueError(f"bench is {row['bench']!r} in the file of {bench!r}")
    return row


def newest_clean(rows: list[Row]) -> list[Row]:
    """The row that counts of each (case, metric), in the order in which the cases appeared."""
    counted: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (json.dumps(row["case"], sort_keys=True), row["metric"])
        if row["dirty"]:
            continue
        if key not in counted or row["time"] >= counted[key]["time"]:
            counted[key] = row
    return list(counted.values())


def render(spec: str, folder: Path = RESULTS) -> str:
    """The Markdown table of `BENCH key=value ...`, or a line that says there are no rows."""
    bench, *filters = spec.split()
    wanted = dict(item.split("=", 1) for item in filters)
    rows = [
        row
        for row in newest_clean(read_rows(bench, folder))
        if all(str(row["case"].get(key)) == value for key, value in wanted.items())
    ]
    return _table(rows, list(wanted)) if rows else "\nNo row has been measured yet.\n\n"


def _table(rows: list[Row], fixed: list[str]) -> str:
    keys = [key for key in rows[0]["case"] if key not in fixed]
    baselines = list(dict.fromkeys(name for row in rows for name in row.get("baselines") or {}))
    header = [*keys, "metric", "value", *baselines, "target", "met", "device", "commit"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        target = row.get("target")
        device = f"{row.get('num_devices', 1)}x {row['device']}"
        lines.append(
            [
                *(str(row["case"].get(key, "")) for key in keys),
                row["metric"],
                f"**{_number(row['value'])}**",
                *(_number((row.get("baselines") or {}).get(name)) for name in baselines),
                f"{target['op']} {_number(target['value'])}" if target else "",
                {None: "", True: "yes", False: "no"}[row.get("met")],
                device,
                row["commit"][:9],
            ]
        )
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main(PAGES, "table", render)
