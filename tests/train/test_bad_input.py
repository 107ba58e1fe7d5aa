"""What a user can get wrong: a message that says what was got, what is legal and what to do.

Refusals come before anything is started or written.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.data import train_bpe
from megascale.env import free_port
from tests.train.command import run_here, train_here, tree, write_recipe

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def _nproc(count: int) -> tuple[str, ...]:
    return ("--nproc", str(count))


DATA = "data.synthetic=false"
PP2 = "parallelism.pipeline_parallel_size=2"
TP2 = "parallelism.tensor_parallel_size=2"
CPU = "training.device=cpu"

# name: settings, further arguments, exit code, what the message says. DIR is the test's folder,
# with prepared data in DIR/data and a file DIR/file.
REFUSED: dict[str, tuple[list[str], tuple[str, ...], int, str]] = {
    "misspelt section": (["modle.hidden_size=3"], (), 2, "'modle'; did you mean 'model'?"),
    "misspelt key": (["model.hidden_sise=3"], (), 2, "'hidden_sise'; did you mean 'hidden_size'?"),
    "unknown key": (["job.zzz=3"], (), 2, "unknown key 'zzz'; legal keys: run_dir, description"),
    "no value": (["model.hidden_size"], (), 2, "is not section.key=value; for example --set"),
    "wrong type": (
        ["training.steps=many"],
        (),
        2,
        "training.steps: got 'many', legal: a whole num",
    ),
    "a switch for a number": (["training.steps=true"], (), 2, "training.steps: got true, legal: a"),
    "unknown preset": (["model.preset=llama9"], (), 2, "'llama9'; did you mean"),
    "heads over tensor ranks": (
        ["parallelism.tensor_parallel_size=3"],
        _nproc(3),
        2,
        "tensor_parallel_size 3 does not divide model.num_heads 4; legal sizes: 1, 2, 4",
    ),
    "odd ranks": (
        ["parallelism.tensor_parallel_size=2"],
        _nproc(3),
        2,
        "3 ranks cannot hold tensor_parallel_size 2 x pipeline_parallel_size 1 = 2 ranks",
    ),
    "more stages than layers": (
        ["parallelism.pipeline_parallel_size=4"],
        _nproc(4),
        2,
        "model.num_layers 2 cannot fill 4 chunks",
    ),
    "chunks without pipeline": (
        ["parallelism.virtual_pipeline_size=2"],
        (),
        2,
        "virtual_pipeline_size is 2 without a pipeline; set",
    ),
    "data ranks contradict": (
        ["parallelism.data_parallel_size=4"],
        _nproc(2),
        2,
        "data_parallel_size is 4, but 2 ranks leave 2; set it to 2 or -1, or start 4 ranks",
    ),
    "batch does not divide": (
        ["training.global_batch_size=5"],
        _nproc(2),
        2,
        "is not a multiple of micro_batch_size 1 x data_parallel_size 2 = 2; nearest legal: 4 or 6",
    ),
    "too few micro-batches": (
        [PP2, "training.global_batch_size=1"],
        _nproc(2),
        2,
        "cannot fill a pipeline of 2 stages; the smallest legal global batch is 2, got 1",
    ),
    "micro-batches of the interleaved schedule": (
        [
            PP2,
            "model.num_layers=4",
            "parallelism.virtual_pipeline_size=2",
            "training.global_batch_size=3",
        ],
        _nproc(2),
        2,
        "in multiples of pipeline_parallel_size 2, got 3; the nearest legal global batches are 2 a",
    ),
    "ramp-up misses the batch": (
        ["training.batch_ramp_up={start=2, increment=4, samples=3}"],
        (),
        2,
        "goes from 2 by 4 and misses training.global_batch_size 4",
    ),
    "a batch of the ramp-up does not divide": (
        ["training.batch_ramp_up={start=1, increment=1, samples=3}"],
        _nproc(2),
        2,
        "global batch 1 is not a multiple",
    ),
    "learned positions too short": (
        ["model.position=learned", "model.max_seq_len=8"],
        (),
        2,
        "training.seq_len 16 is longer than the 8 learned positions",
    ),
    "no vocabulary": (["model.vocab_size=null"], (), 2, "model.vocab_size is not given"),
    "no data named": ([DATA], (), 3, "data.path is not set; name a folder made by"),
    "data missing": ([DATA, "data.path=DIR/no"], (), 3, "no prepared data in DIR/no"),
    "small vocabulary": (
        [DATA, "data.path=DIR/data", "model.vocab_size=100"],
        (),
        3,
        "model.vocab_size is 100, the tokenizer of DIR/data has 280 entries; set",
    ),
    "data shorter than a sample": (
        [DATA, "data.path=DIR/data", "model.vocab_size=null", "training.seq_len=100000"],
        (),
        3,
        "less than one sample of seq_len 100000",
    ),
    "operators for GPUs": (
        [TP2, CPU, "parallelism.flux=chunked"],
        _nproc(2),
        2,
        "parallelism.flux is \"chunked\", and training.device is 'cpu'; the kernels need CUDA de",
    ),
    "operators for GPUs, where there are none": (
        [TP2, "training.device=auto", "parallelism.flux=fused"],
        _nproc(2),
        2,
        'parallelism.flux is "fused", and this machine has no CUDA device (training.device ',
    ),
    "operators that starve NCCL": (
        [TP2, "training.device=cuda", "parallelism.flux=fused"],
        _nproc(4),
        2,
        'parallelism.flux is "fused" with pipeline or data parallelism, whose NCCL transfers st',
    ),
    "backend for GPUs": (
        [CPU, "comm.backend=nccl"],
        _nproc(2),
        2,
        "comm.backend is 'nccl', which needs CUDA devices, and training.device is 'cpu'; use 'aut",
    ),
    "run folder is a file": (["job.run_dir=DIR/file/run"], (), 2, "DIR/file is a file; name"),
    "nothing to resume": ([], ("--resume",), 4, "--resume: DIR/run holds no run"),
    "no weights": (["checkpoint.initial_load_path=DIR/no"], (), 4, "'DIR/no', which is no folder"),
}


@pytest.fixture
def no_gpus(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("nothing_starts", "data", "no_gpus")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_happens(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, name: str
) -> None:
    (tmp_path / "file").write_text("")
    settings, more, code, message = REFUSED[name]
    here = [setting.replace("DIR", str(tmp_path)) for setting in settings]
    write_recipe(tmp_path)
    before = list(tree(tmp_path))
    assert train_here(monkeypatch, tmp_path / "run", *here, more=more) == code
    errors = capsys.readouterr().err
    assert message.replace("DIR", str(tmp_path)) in errors
    assert errors.count("error:") == 1
    assert list(tree(tmp_path)) == before


@pytest.mark.usefixtures("nothing_starts", "no_gpus")
@pytest.mark.parametrize("name", [name for name in REFUSED if "GPUs" in name or "NCCL" in name])
def test_a_plan_refuses_what_the_devices_cannot(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, name: str
) -> None:
    settings, more, code, message = REFUSED[name]
    arguments = (*more, "--dry-run")
    assert train_here(monkeypatch, tmp_path / "run", *settings, more=arguments) == code
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""


@pytest.mark.usefixtures("no_gpus")
def test_a_plan_for_a_machine_with_gpus(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    settings = [TP2, "training.device=cuda", "parallelism.flux=chunked"]
    more = (*_nproc(2), "--dry-run")
    assert train_here(monkeypatch, tmp_path / "run", *settings, more=more) == 0
    assert "tensor parallel 2" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpus")
def test_a_rank_of_a_launcher_refuses_before_it_waits_for_peers(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    _as_rank(monkeypatch, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, **place)
    settings = [TP2, "training.device=auto", "parallelism.flux=chunked"]
    assert train_here(monkeypatch, tmp_path / "run", *settings) == 2
    assert "and this machine has no CUDA device" in capsys.readouterr().err


def test_a_recipe_that_cannot_be_read(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    assert run_here(monkeypatch, "train", str(tmp_path / "no.toml")) == 2
    assert "no.toml does not exist; give a TOML file" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text("steps 3")
    assert run_here(monkeypatch, "train", str(tmp_path / "bad.toml")) == 2
    assert "bad.toml does not parse: Expected '='" in capsys.readouterr().err


def _on_data(data: Path) -> list[str]:
    return [DATA, f"data.path={data}", "model.vocab_size=null"]


def _cut(data: Path) -> None:
    os.truncate(data / "train.bin", (data / "train.bin").stat().st_size // 2)


def _other_tokenizer(data: Path) -> None:
    train_bpe(["quite another text"], 280).save(data)


def _no_meta(data: Path) -> None:
    (data / "meta.json").unlink()


def _without(name: str) -> Any:
    return lambda data: (data / name).unlink()


DAMAGES = {
    "token file cut short": (_cut, "train.bin"),
    "token file missing": (_without("train.bin"), "train.bin"),
    "index missing": (_without("train.idx"), "train.idx"),
    "tokenizer of other data": (_other_tokenizer, "its tokens were made with"),
    "tokenizer missing": (_without("tokenizer.json"), "tokenizer.json"),
    "meta data missing": (_without("meta.json"), "no prepared data in"),
}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_is_refused(
    tmp_path: Path, data: Path, monkeypatch: Patch, capsys: Capture, damage: str
) -> None:
    change, message = DAMAGES[damage]
    change(data)
    assert train_here(monkeypatch, tmp_path / "run", *_on_data(data), more=_nproc(2)) == 3
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_a_missing_validation_split_is_refused_at_the_start(
    tmp_path: Path, data: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (data / "valid.bin").unlink()
    settings = [*_on_data(data), "validation.interval=1"]
    assert train_here(monkeypatch, tmp_path / "run", *settings) == 3
    assert "valid.bin" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def bound_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.usefixtures("nothing_starts")
def test_a_port_in_use(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, bound_port: int
) -> None:
    more = (*_nproc(2), "--master-port", str(bound_port))
    assert train_here(monkeypatch, tmp_path / "run", more=more) == 5
    message = f"port {bound_port} on 127.0.0.1 cannot be used (Address already in use); choose"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _as_rank(monkeypatch: Patch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_that_finds_the_port_taken(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, bound_port: int
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": bound_port}
    _as_rank(monkeypatch, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, **place)
    assert train_here(monkeypatch, tmp_path / "run", "comm.init_timeout_s=2") == 5
    message = f"rank 0 of 2 could not join the process group at tcp://127.0.0.1:{bound_port}"
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_rank_whose_peers_do_not_come(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    _as_rank(monkeypatch, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, **place)
    assert train_here(monkeypatch, tmp_path / "run", "comm.init_timeout_s=1") == 5
    assert "check that all ranks start" in capsys.readouterr().err


LAUNCHERS: dict[str, tuple[dict[str, object], tuple[str, ...], int, str]] = {
    "local rank out of range": (
        {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 2},
        (),
        5,
        "rank 0 of 2 is local rank 3 of 2; local ranks go from 0",
    ),
    "rank out of range": ({"RANK": 2, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, (), 5, "LOCAL_WORLD_SIZE"),
    "incomplete": ({"RANK": 0, "LOCAL_RANK": 0}, (), 5, "WORLD_SIZE not set beside RANK"),
    "no number": ({"RANK": "x", "WORLD_SIZE": 2, "LOCAL_RANK": 0}, (), 5, "RANK is 'x'"),
    "nproc": (
        {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0},
        _nproc(2),
        2,
        "--nproc 2 was given to a rank that torchrun started; leave it out",
    ),
    "master port": (
        {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0},
        ("--master-port", "1234"),
        2,
        "--master-port 1234 was given to a rank that torchrun started; leave it out",
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_that_contradict(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, name: str
) -> None:
    variables, more, code, message = LAUNCHERS[name]
    _as_rank(monkeypatch, **variables)
    assert train_here(monkeypatch, tmp_path / "run", more=more) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
