"""The work that needs torch: its results are checked, and equal bits come out of equal input."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from megascale.train.selfcheck.all_to_all import _piece
from megascale.train.selfcheck.gemm import _check, _operands
from megascale.train.selfcheck.replay import train_and_hash
from tools.blocks import ROOT

CPU = torch.device("cpu")


def test_the_replay_repeats_itself_and_sees_one_bit() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        once = train_and_hash(CPU)
        assert train_and_hash(CPU) == once
        assert train_and_hash(CPU, flip=True) != once
    finally:
        torch.set_num_threads(threads)


def test_a_wrong_product_is_an_error() -> None:
    a, b, c = _operands(128, CPU, torch.float32)
    with pytest.raises(ValueError, match="a matrix product on cpu is wrong"):
        _check(a, b, c, 1e-4)  # never written: NaN
    torch.mm(a, b, out=c)
    _check(a, b, c, 1e-4)
    c[2, 4] += 1.0
    with pytest.raises(ValueError, match="relative error"):
        _check(a, b, c, 1e-4)


def test_every_piece_of_an_all_to_all_can_be_told() -> None:
    pieces = [_piece(source, target, 64, CPU) for source in range(8) for target in range(8)]
    assert len({tuple(piece.tolist()) for piece in pieces}) == 64


def test_an_unknown_workload_is_refused() -> None:
    argv = [sys.executable, "-m", "megascale.train.selfcheck", "gem", "{}"]
    got = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert got.returncode == 1
    assert re.search("no workload is called 'gem'; there are gemm, mesh", got.stderr)
