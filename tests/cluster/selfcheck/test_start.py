"""`megascale selfcheck`: exit codes, the table, and refusals before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megascale.cli import app
from megascale.cluster.selfcheck import start
from megascale.errors import MegascaleError

CHECK = {"value": 1.5, "unit": "GB/s", "expected": 2.0, "seconds": 0.25, "reason": "", "detail": {}}


def report(ok: bool, pairs: dict[str, bool]) -> dict[str, Any]:
    checks = [
        {**CHECK, "name": "memory", "ok": ok, "reason": "" if ok else "slow"},
        {**CHECK, "name": "mesh", "ok": None, "value": None, "reason": "no GPU"},
    ]
    return {"ok": ok, "node": "n7", "level": "light", "seconds": 3.0, "checks": checks} | {
        "not_applicable": ["mesh"],
        "pairs": pairs,
    }


@pytest.mark.parametrize(
    ("ok", "pairs", "code"), [(True, {}, 0), (False, {}, 1), (True, {"b": False}, 1)]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_codes_and_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, ok: bool, pairs: dict[str, bool], code: int, as_json: bool
) -> None:
    asked: list[Any] = []

    def run(*arguments: Any) -> dict[str, Any]:
        asked.extend(arguments)
        return report(ok, pairs)

    monkeypatch.setattr(start, "run_node_checks", run)
    argv = ["selfcheck", "--level", "full", "--peers", "b@h:1/0", "--run-dir", "there"]
    got = CliRunner().invoke(app, [*argv, "--json"] if as_json else argv)
    assert got.exit_code == code
    assert asked == ["full", 120.0, Path("there"), None, ["b@h:1/0"]]
    if as_json:
        assert json.loads(got.output)["pairs"] == pairs
        return
    lines = got.output.splitlines()
    if ok:
        assert lines[0] == "memory  passed          1.5 of 2 GB/s    0.2 s"
        assert lines[2] == "n7 is fit (light, 3.0 s)"
    else:
        assert lines[0] == "memory  FAILED          1.5 of 2 GB/s    0.2 s  slow"
        assert lines[2] == "n7 is NOT fit (light, 3.0 s)"
    assert "does not apply" in lines[1]
    assert "no GPU" in lines[1]


@pytest.mark.parametrize(
    "argv", [["--level", "heavy"], ["--peers", "b"], ["--expected", "/none.toml"]]
)
def test_what_cannot_be_asked_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr(start, "run_node_checks", lambda *_: pytest.fail("it started"))
    got = CliRunner().invoke(app, ["selfcheck", *argv])
    assert isinstance(got.exception, MegascaleError)
