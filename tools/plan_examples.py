"""Write the examples of `docs/plan-a-run.md`: what `megascale plan` prints today.

Not among what `make check` compares: a plan changes with every cluster file that is calibrated
anew, and takes seconds. `make docs` writes them. The time that a search took is left out, as it is
another one each time.
"""

from __future__ import annotations

import re
import shlex

from typer.testing import CliRunner

from megascale.cli import app
from tools.blocks import ROOT, main

PAGE = ROOT / "docs" / "plan-a-run.md"
_TIME = re.compile(r" in \d+\.\d s: ")


def render(arguments: str) -> str:
    """The command and its output, as a block of text."""
    done = CliRunner().invoke(app, ["plan", *shlex.split(arguments)])
    if done.exit_code:
        raise SystemExit(f"megascale plan {arguments}: {done.output}{done.exception}")
    return f"```\n$ megascale plan {arguments}\n{_TIME.sub(': ', done.output).rstrip()}\n```\n"


if __name__ == "__main__":
    main([PAGE], "plan", render)
