"""The cases: what megascale runs, and what the peers are told of it."""

from __future__ import annotations

import pytest

from benchmarks.peers.cases import CASES, PEERS, checked_case, peer_command
from megascale.errors import ConfigError


def test_a_peer_gets_the_layout_of_the_case() -> None:
    setup = CASES["175b-pp2-mbs1"]
    case = checked_case(setup, steps=None, more=(), num_gpus=2)
    command = peer_command(PEERS["megatron-fused"], case, 1234)
    text = " ".join(command)
    assert "-m benchmarks.peers.megatron --model gpt3-175b-4l --device cuda" in text
    assert "--tp 1 --pp 2 --vp 2 --mbs 1 --gbs 16 --seq 2048 --steps 8" in text
    assert text.endswith("--fused-wgrad")


@pytest.mark.parametrize(
    ("name", "schedule", "share_head", "joined"),
    [
        ("175b-tp2-mbs1", "1f1b", False, 4),
        ("175b-tp2-mbs4", "1f1b", False, 1),
        ("175b-pp2-mbs1", "interleaved_zb", True, 1),
    ],
)
def test_megascale_runs_as_it_is_fastest(
    name: str, schedule: str, share_head: bool, joined: int
) -> None:
    par = checked_case(CASES[name], steps=None, more=(), num_gpus=2).config.parallelism
    assert par.schedule == schedule
    assert par.share_head is share_head
    assert par.join_weight_gradients == joined


def test_a_shape_that_the_peers_would_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"another model for the peers \(num_layers\)"):
        checked_case(CASES["7b-dp2"], steps=None, more=["model.num_layers=2"], num_gpus=2)
    parallel = ["model.block=parallel", "model.attention_window=768"]
    checked_case(CASES["7b-dp2"], steps=None, more=parallel, num_gpus=2)
