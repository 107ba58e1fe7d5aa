"""The house itself: dependencies are pinned, links lead somewhere, the hook is installed."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools.blocks import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*/*.md"))]


def test_every_dependency_is_pinned_for_ci() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(item for extra in extras for item in extra)]
    names = {re.split(r"[<>=; ]", item)[0] for item in wanted}
    names -= {f"megascale[{extra}]" for extra in project["optional-dependencies"]}  # of its own
    names = {name.partition("[")[0] for name in names}
    lines = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if not line.startswith("#")}
    assert not names - pinned


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_readme_is_short_and_its_map_names_what_exists() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200
    named = re.findall(r"^\| `([a-z_/.]+)`", "\n".join(lines), re.MULTILINE)
    assert "megascale/config/" in named
    assert not [path for path in named if not (ROOT / path).exists()]


def _install_hooks(repository: Path) -> subprocess.CompletedProcess[str]:
    script = repository / "tools" / "install-hooks.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text((ROOT / "tools" / "install-hooks.sh").read_text())
    return subprocess.run(["bash", script], capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def test_the_hook_stops_a_commit_that_fails_the_check(repository: Path) -> None:
    (repository / "Makefile").write_text("check:\n\t@echo planted failure; exit 1\n")
    assert _install_hooks(repository).returncode == 0
    assert _install_hooks(repository).returncode == 0, "installing twice changes nothing"
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    commit = subprocess.run(
        ["git", *author, "commit", "--allow-empty", "-m", "x"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert commit.returncode != 0
    assert "planted failure" in commit.stdout + commit.stderr


def test_a_hook_of_somebody_else_is_kept(repository: Path) -> None:
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho mine\n")
    result = _install_hooks(repository)
    assert result.returncode == 1
    assert "exists and is not ours" in result.stderr
    assert "mine" in hook.read_text()
