"""Render the tables of results in README and docs from `benchmarks/results/*.jsonl`.

A row is one case measured once (`benchmarks/README.md` has the form). Of a case, the newest row
measured on a clean tree counts; rows of a dirty tree stay in the file and never reach a table.

A page asks for a table by `<!-- table: BENCH key=value ... show=NAME,NAME sort=KEY,KEY -->`: the
rows of that bench whose case has these values (`key=A,B`: one of them), with other fields of the
rows beside the metric (`forms.fused` is a field of a field), sorted by keys of the case, else as in
the file. What all rows have in common stands in a sentence above the table.

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
    """The Markdown of `BENCH key=value ... show=NAME,NAME`; a line says where there are no rows."""
    bench, *options = spec.split()
    wanted = dict(item.split("=", 1) for item in options)
    shown, keys = ([k for k in wanted.pop(name, "").split(",") if k] for name in ("show", "sort"))
    rows = [
        row
        for row in newest_clean(read_rows(bench, folder))
        if all(str(row["case"].get(key)) in value.split(",") for key, value in wanted.items())
    ]
    rows.sort(key=lambda row: [row["case"][key] for key in keys])
    if not rows:
        return "\nNo row has been measured yet.\n\n"
    common, columns = _columns(rows, shown)
    lines = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"\n{common}\n\n{table}\n" if common else f"\n{table}\n"


def _columns(rows: list[Row], shown: list[str]) -> tuple[str, dict[str, list[str]]]:
    """The sentence of what is the same in all rows, and the columns of the rest, by name."""
    keys = dict.fromkeys(key for row in rows for key in row["case"])  # older rows may lack some
    described = {
        **{key: [str(row["case"].get(key, "")) for row in rows] for key in keys},
        "metric": [row["metric"] for row in rows],
        "device": [_device(row) for row in rows],
        "commit": [row["commit"][:9] for row in rows],
    }
    same = {key for key, cells in described.items() if len(rows) > 1 and len(set(cells)) == 1}
    common = ", ".join(f"{key} {described[key][0]}" for key in described if key in same)
    varying = {key: cells for key, cells in described.items() if key not in same}
    origin = {key: varying.pop(key) for key in ("device", "commit") if key in varying}
    baselines = dict.fromkeys(name for row in rows for name in row.get("baselines") or {})
    measured = {
        "value": [f"**{_number(row['value'])}**" for row in rows],
        **{name: [_shown(row, name) for row in rows] for name in shown},
        **{n: [_number((row.get("baselines") or {}).get(n)) for row in rows] for n in baselines},
        "target": [_target(row) for row in rows],
        "met": [{None: "", True: "yes", False: "no"}[row.get("met")] for row in rows],
    }
    return f"All rows: {common}." if common else "", {**varying, **measured, **origin}


def _device(row: Row) -> str:
    count = row.get("num_devices", 0)
    return f"{count}x {row['device']}" if count else row["device"]


def _target(row: Row) -> str:
    target = row.get("target")
    return f"{target['op']} {_number(target['value'])}" if target else ""


def _shown(row: Row, name: str) -> str:
    """The field of a row, or of a field of it, as a cell."""
    found: Any = row
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, str) else _number(found)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main(PAGES, "table", render)
