"""The Python in the pages runs: every block of a page, in order, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.blocks import ROOT

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {page: PYTHON.findall(page.read_text()) for page in sorted((ROOT / "docs").glob("*.md"))}


@pytest.mark.parametrize(
    "page", [page for page, blocks in PAGES.items() if blocks], ids=lambda page: page.name
)
def test_the_python_of_the_page_runs(page: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(PAGES[page])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
