"""The peers themselves, for real, on two CPU processes. Skipped where they are not installed.

CI does not install them; benchmarks/peers/README.md says how to. Any Python that can import them
and what `make env-dev` installs runs these tests.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import compare
from benchmarks.peers.cases import CASES, PEERS, Setup
from benchmarks.peers.result import Result, find
from tests.train.bench.planted import write_tiny
from tools.blocks import ROOT
from tools.tables import read_rows

HAVE = {name: importlib.util.find_spec(name) is not None for name in ("megatron", "torchtitan")}
needs_megatron = pytest.mark.skipif(not HAVE["megatron"], reason="megatron-core is not installed")
needs_titan = pytest.mark.skipif(not HAVE["torchtitan"], reason="torchtitan is not installed")
pytestmark = pytest.mark.timeout(300)  # two interpreters a run, on a machine that may be busy
COMMON = "--device cpu --steps 5 --seed 7"


def run_ranks_of(program: str, line: str) -> Result:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "--standalone", "-m", f"tests.peers.{program}", *COMMON.split(), *line.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = find(done.stdout)
    assert isinstance(found, Result), done.stdout[-2000:] + done.stderr[-4000:]
    return found


@needs_megatron
@pytest.mark.parametrize(
    "line",
    [
        "--model tiny-gpt --tp 2 --gbs 8 --mbs 2",
        "--model tiny-gpt --pp 2 --vp 2 --gbs 8 --mbs 2",
        "--model tiny-gpt --pp 2 --gbs 8 --mbs 2",
        "--model tiny-llama --gbs 8 --mbs 2",
        "--model tiny-llama --tp 2 --gbs 8 --mbs 4 --recompute-layers 2",
    ],
)
def test_megatron_trains_each_layout(line: str) -> None:
    found = run_ranks_of("megatron_on_cpu", f"{line} --seq 128")
    assert found.losses[0] == pytest.approx(found.expected_loss, rel=0.01)
    assert len(found.losses) == len(found.step_s) == 5
    assert found.settings["attention"]


@needs_megatron
def test_the_stand_in_for_apex_changes_rounding_alone() -> None:
    line = "--model tiny-gpt --gbs 8 --mbs 2 --seq 64"
    plain = run_ranks_of("megatron_on_cpu", line).losses
    fused = run_ranks_of("megatron_on_cpu", f"{line} --fused-wgrad").losses
    assert plain[0] == fused[0]
    assert plain != fused
    assert fused == pytest.approx(plain, rel=1e-4)


@needs_titan
@pytest.mark.parametrize(
    "line",
    [
        "--model tiny-llama --gbs 32 --mbs 8 --recompute none --reshard never",
        "--model tiny-gpt --gbs 32 --mbs 8 --tp 2",
        "--model tiny-gpt --gbs 32 --mbs 8 --pp 2 --vp 2 --recompute none",
        "--model tiny-gpt --gbs 32 --mbs 8 --pp 2 --recompute none",
    ],
)
def test_titan_trains_each_layout(line: str) -> None:
    found = run_ranks_of("titan_on_cpu", f"{line} --seq 128 --no-compile")
    assert found.losses[0] == pytest.approx(found.expected_loss, rel=0.03)  # 4096 tokens, h 64
    assert len(found.losses) == 2
    assert len(found.step_s) == 5


@needs_megatron
def test_a_case_is_compared_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_tiny(tmp_path, '[model]\npreset = "tiny-gpt"\n[data]\nsynthetic = true\n')
    overrides = (
        "training.seq_len=128",
        "training.micro_batch_size=4",
        "training.global_batch_size=16",
        "training.dtype=bfloat16",
        "training.device=cpu",
    )
    setup = Setup(str(recipe), "tiny-gpt", overrides, step_s=1.0, steps=5)
    peer = replace(PEERS["megatron"], program="tests.peers.megatron_on_cpu")
    monkeypatch.setitem(CASES, "tiny", setup)
    monkeypatch.setitem(PEERS, "megatron", peer)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    arguments = ["tiny", "--systems", "megascale,megatron", "--rounds", "1", "--commit", "abc"]
    code = compare.main([*arguments, "--output", str(tmp_path / "step.jsonl")])
    assert code == 0, capsys.readouterr().out
    assert len(read_rows("step", tmp_path)) == 1
    ours, theirs = read_rows("peers", tmp_path)
    assert theirs["case"] == {**ours["case"], "system": "megatron"}
    assert theirs["losses"][0] == pytest.approx(ours["losses"][0], rel=0.01)
