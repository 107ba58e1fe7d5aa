"""Generated blocks inside hand-written Markdown pages.

A block lies between `<!-- KIND: SPEC -->` and `<!-- end KIND -->`. What stands between the two is
written by a tool and never by hand; the rest of the page is never touched.

Invariant: rendering a page twice gives the same bytes, so `--check` compares bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fill(text: str, kind: str, render: Callable[[str], str]) -> str:
    """`text` with every block of `kind` replaced by `render(spec)`.

    Raises ValueError where a block is opened and not closed.
    """
    opened = len(re.findall(rf"^<!-- {kind}: ", text, re.MULTILINE))
    block = re.compile(
        rf"^(<!-- {kind}: (?P<spec>.*?) -->\n)(?P<body>.*?)^(<!-- end {kind} -->)$",
        re.MULTILINE | re.DOTALL,
    )
    filled, count = block.subn(lambda m: f"{m[1]}{render(m['spec'])}{m[4]}", text)
    if count != opened:
        raise ValueError(f"{opened} blocks `<!-- {kind}: ... -->` are opened, {count} are closed")
    return filled


def update(pages: Iterable[Path], kind: str, render: Callable[[str], str], *, check: bool) -> int:
    """Fill the pages, or with `check` only compare. Returns the exit code."""
    stale = []
    for page in pages:
        old = page.read_text()
        new = fill(old, kind, render)
        if new == old:
            continue
        stale.append(str(page.relative_to(ROOT)))
        if not check:
            page.write_text(new)
            print(f"wrote {stale[-1]}")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run: make docs", file=sys.stderr)
        return 1
    return 0


def main(pages: Iterable[Path], kind: str, render: Callable[[str], str]) -> None:
    """The command line of a tool that owns the blocks of `kind`: nothing, or `--check`."""
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(f"got {' '.join(sys.argv[1:])}; legal: nothing (write the pages), or --check")
    sys.exit(update(pages, kind, render, check=sys.argv[1:] == ["--check"]))
