"""Shapes and layouts of the peers, and what they refuse before anything starts."""

from __future__ import annotations

import argparse
import math
import re
import shlex

import pytest
import torch

from benchmarks.peers import megatron, titan, wgrad
from benchmarks.peers.cases import CASES, PEERS
from benchmarks.peers.options import (
    SHAPES,
    Options,
    add_options,
    llama_block,
    missing,
    read_options,
    shape,
)
from benchmarks.peers.result import (
    OUT_OF_MEMORY,
    Result,
    as_line,
    check,
    expected_gpt_loss,
    failure_line,
    find,
    median_of_timed,
)
from megascale.config import ModelConfig
from megascale.errors import ConfigError, NumericalError
from megascale.units import flops_per_token, matmul_parameters
from tools.blocks import ROOT


def options_of(line: str, world_size: int = 2) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_options(parser.parse_args(shlex.split(line)), world_size)


def test_ranks_that_are_left_are_data_parallel() -> None:
    options = options_of("--model 7b --mbs 2 --gbs 32 --seq 2048 --tp 2", world_size=4)
    assert (options.dp, options.num_micro_batches) == (2, 8)


def test_llamas_block_costs_what_the_gpt_costs() -> None:
    wide = shape("gpt3-175b-4l")
    assert llama_block(wide).ffn_size == 32768
    assert flops_per_token(llama_block(wide), 2048) == flops_per_token(wide, 2048)
    narrow = shape("7b")
    more = flops_per_token(llama_block(narrow), 2048) / flops_per_token(narrow, 2048)
    assert 1.0 < more < 1.01  # 8/3 of 4096, rounded up to 11008
    llama = shape("llama3-8b")
    assert matmul_parameters(llama_block(llama)) == matmul_parameters(llama)


def test_shapes_are_those_of_the_presets() -> None:
    assert {name: shape(name).num_heads for name in SHAPES} == {
        "gpt3-175b-4l": 96,
        "gpt3-175b-4l-128h": 128,
        "gpt3-175b-8l": 96,
        "7b": 32,
    }
    assert shape("llama3-8b") == ModelConfig(preset="llama3-8b")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--model lama3-8b", "did you mean 'llama3-8b'?; also legal: gpt3-175b-4l"),
        ("--model 7b --tp 3", "2 rank(s) are not a multiple of --tp 3 x --pp 1"),
        ("--model 7b --mbs 3", "--gbs 16 is not a multiple of --mbs 3 x 2 data-parallel ranks"),
        ("--model 7b --vp 2", "--vp is 2 without a pipeline"),
        ("--model gpt3-175b-4l --pp 2 --vp 3", "has 4 layers, which 6 chunks (--pp 2 x --vp 3)"),
        ("--model 7b --pp 2 --mbs 16", "1 micro-batches a step are not a multiple of --pp 2"),
        ("--model 7b --steps 4", "--steps is 4; the first 3 and the last are left out"),
        ("--model 7b --gbs 0", "--gbs is 0; give 1 or more"),
    ],
)
def test_what_a_peer_cannot_run_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        options_of(line)


@pytest.mark.parametrize("program", [megatron, titan])
def test_a_peer_that_is_absent_is_named_and_nothing_starts(
    program: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program in (megatron, titan)
    main = megatron.main if program is megatron else titan.main
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    assert main(["--model", "7b"]) == 2
    said = capsys.readouterr().err
    assert "cannot run here" in said
    assert "`make peers-wheels`" in said
    assert said.count("\n") == 1


def test_what_is_installed_is_not_missing() -> None:
    assert missing(["json", "no_such_peer"]) == ["no_such_peer"]


def test_wheels_bring_every_import_that_the_peers_need_and_pin_it() -> None:
    script = (ROOT / "benchmarks" / "peers" / "wheels.sh").read_text()
    pinned = set(re.findall(r"^ +([a-z-]+)==[0-9.]+", script, re.MULTILINE))
    there = {"einops", "pyarrow"}  # of the GPU machine's own packages
    needed = {name for peer in PEERS.values() for name in peer.modules} - there
    names = {name.replace("_", "-") for name in needed} - {"megatron"} | {"megatron-core"}
    assert pinned == names


def test_the_stand_in_for_apex_adds_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(64, 24, generator=generator).bfloat16()
    grad_y_TO = torch.randn(64, 16, generator=generator).bfloat16()
    main_grad_OI = torch.randn(16, 24, generator=generator)
    wanted = main_grad_OI.double() + grad_y_TO.double().t() @ x_TI.double()
    wgrad.accumulate(x_TI, grad_y_TO, main_grad_OI)
    assert torch.allclose(main_grad_OI.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_the_stand_in_for_apex_adds_in_fp32_on_a_gpu() -> None:
    x_TI = torch.randn(2048, 512, device="cuda").bfloat16()
    grad_y_TO = torch.randn(2048, 256, device="cuda").bfloat16()
    main_grad_OI = torch.randn(256, 512, device="cuda")
    wanted = main_grad_OI.double() + grad_y_TO.double().t() @ x_TI.double()
    wgrad.accumulate(x_TI, grad_y_TO, main_grad_OI)
    error = (main_grad_OI.double() - wanted).norm() / wanted.norm()
    assert error < 1e-5, error


def test_torch_tells_which_attention_it_takes() -> None:
    """A private function of torch, which the peer's row uses: this says when it is gone."""
    q = torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16)
    kv = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    assert torch._fused_sdp_choice(q, kv, kv, is_causal=True, enable_gqa=True) >= 0


def result(**changes: object) -> Result:
    fields: dict[str, object] = {
        "system": "megatron_core",
        "version": "0.19.2",
        "model": "7b",
        "step_s": [9.0, 2.0, 2.0, 1.1, 1.0, 1.3, 7.0],
        "median_s": 1.1,
        "losses": [11.9, 11.8],
        "expected_loss": expected_gpt_loss(shape("7b")),
        "peak_reserved_gb": 95.5,
        "peak_allocated_gb": 90.0,
    }
    return Result(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_result_is_found_among_what_was_printed() -> None:
    one = result()
    assert find(f"warning\n[default0]:{as_line(one)}\nbye") == one
    assert find(f'{{"peer": 1\n{failure_line("torchtitan", OUT_OF_MEMORY)}\n') == OUT_OF_MEMORY
    assert find("nothing\n{}\n") is None


def test_warm_up_and_the_last_step_do_not_count() -> None:
    assert median_of_timed(result().step_s) == 1.1


def test_losses_that_are_not_those_of_untrained_weights_are_refused() -> None:
    expected = math.log(64000) + 4096 * 0.02**2 / 2
    assert expected_gpt_loss(shape("7b")) == pytest.approx(expected)
    check(result(losses=[expected * 1.009]))
    with pytest.raises(NumericalError, match=r"must cost 11\.8858 within 1%"):
        check(result(losses=[expected * 1.011]))
    with pytest.raises(NumericalError, match="not all finite"):
        check(result(losses=[expected, math.nan]))
    with pytest.raises(NumericalError, match="not all finite"):
        check(result(losses=[]))


def test_every_case_has_a_shape_that_the_peers_know() -> None:
    assert {setup.model for setup in CASES.values()} == {
        "gpt3-175b-4l",
        "gpt3-175b-4l-128h",
        "7b",
        "llama3-8b",
    }
