"""The examples run, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.blocks import ROOT


def _ended(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def _run(*command: str) -> str:
    result = _ended(*command)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("arguments", "idle", "in_flight"),
    [
        # the bubble of 1F1B is (p - 1) of (m + p - 1) slots, interleaving divides p - 1 by v
        ("1f1b 4 1 8", 3 / 11, "4, 3, 2, 1"),
        ("interleaved_1f1b 4 2 8", 1.5 / 9.5, "11, 9, 7, 5"),
        ("gpipe 2 1 4", 1 / 5, "4, 4"),
        # in halves a stage idles p - 1 units in place of 3 (p - 1)
        ("zb_h1 4 1 8", 3 / 27, "4, 3, 2, 1"),
    ],
)
def test_draw_schedule(arguments: str, idle: float, in_flight: str) -> None:
    output = _run("examples/draw_schedule.py", *arguments.split())
    assert f"idle {idle:.1%}" in output
    assert f"in flight a stage: {in_flight}\n" in output


def test_spans_around_a_loop(tmp_path: Path) -> None:
    output = _run("examples/spans_around_a_loop.py", str(tmp_path))
    for name in ("forward", "backward", "optimizer", "data_wait"):
        assert f"{name} " in output
    assert (tmp_path / "telemetry" / "rank_00000.jsonl").read_text().count('"kind":"span"') == 8


@pytest.mark.full
def test_tensor_parallel_mlp() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = _run(*torchrun, "examples/tensor_parallel_mlp.py")
    assert "rank 0 of 2: (32, 32) equals" in output
    assert "rank 1 of 2: (32, 32) equals" in output


@pytest.mark.full
def test_fused_mlp() -> None:
    """It learns, and the same for any number of ranks."""
    losses = []
    for ranks in (1, 2):
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        output = _run(*torchrun, "examples/fused_mlp.py")
        found = re.fullmatch(rf"{ranks} ranks: loss ([\d.]+) -> ([\d.]+) in 20 steps\n", output)
        assert found, output
        losses.append([float(loss) for loss in found.groups()])
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert losses[0][1] < 0.6 * losses[0][0]


@pytest.mark.parametrize(
    "command",
    [
        ("spans_around_a_loop.py",),
        ("tensor_parallel_mlp.py",),
        ("fused_mlp.py",),
        ("draw_schedule.py", "1f1b", "x"),
    ],
    ids=lambda command: command[0],
)
def test_started_wrongly_they_say_how(command: tuple[str, ...]) -> None:
    example = f"examples/{command[0]}"
    result = _ended(example, *command[1:])
    assert result.returncode == 2
    assert result.stderr.startswith("usage: ")
    assert example in result.stderr
    assert result.stderr.count("\n") == 1
