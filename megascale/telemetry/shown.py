"""How ranks, shares and times are written for a person, the same in every sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_PARTS = 8


def ranks_text(ranks: Iterable[int], most: int = MOST_PARTS) -> str:
    """`3, 5, 8-11 and 2 more`: runs of neighbours are joined."""
    runs: list[list[int]] = []
    for rank in sorted({int(one) for one in ranks}):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    more = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {more} more" if more > 0 else "")


def named(ranks: Sequence[int], most: int = MOST_PARTS) -> str:
    """`rank 5`, `ranks 5-7`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks, most)}"


def counted(number: int, what: str, many: str | None = None) -> str:
    """`1 window`, `3 windows`."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def seconds(value_s: float) -> str:
    """`1.523 s`, `45.1 ms`, `812 us`, `3 min 20 s`."""
    if abs(value_s) >= 60:
        minutes, rest = divmod(round(value_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    if abs(value_s) >= 1:
        return f"{value_s:.3f} s"
    if abs(value_s) >= 1e-3:
        return f"{value_s * 1e3:.1f} ms"
    return f"{value_s * 1e6:.0f} us"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines; the first row is the head, the first column is text, the others numbers."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
