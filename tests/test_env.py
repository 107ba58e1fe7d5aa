"""Launchers' variables: who this rank is, and which sets are refused; env.py is the only reader."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

import megascale
from megascale import env
from megascale.env import (
    MULTICAST_OFF,
    AgentEnvironment,
    RankEnvironment,
    agent_environment,
    child_environment,
    driver_token_file,
    first_slurm_node,
    free_port,
    installed_versions,
    multicast_is_off,
    rank_environment,
    selfcheck_faults,
    switch_multicast_off,
)
from megascale.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_NODELIST": "gpu[003-004]",
    "SLURM_TASKS_PER_NODE": "4,3",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", {}),
        ("memory", {"memory": "fail"}),
        ("gemm:0.5", {"gemm": "0.5"}),
        ("replay:flip, hang:all_to_all", {"replay": "flip", "all_to_all": "hang"}),
        ("crash:host", {"host": "crash"}),
    ],
)
def test_faults_of_a_selfcheck(text: str, faults: dict[str, str]) -> None:
    given = {"MEGASCALE_SELFCHECK_FAULT": text}
    assert selfcheck_faults(given) == faults
    agent_environment(given)  # known: trainers under the same variables start


@pytest.mark.parametrize("text", ["gemm:half", "hang:", "hang:a:b", "gemm 0.5", "gemm:-1"])
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="expected CHECK, CHECK:FACTOR"):
        selfcheck_faults({"MEGASCALE_SELFCHECK_FAULT": text})


def test_no_launcher_is_a_world_of_one() -> None:
    assert rank_environment({}) == RankEnvironment()
    assert rank_environment({"MASTER_ADDR": "left-over", "HOME": "/"}) == RankEnvironment()


def test_torchrun() -> None:
    got = rank_environment(TORCHRUN)
    assert got == RankEnvironment(5, 8, 1, 4, "node0", 29500, "torchrun")
    assert got.rendezvous == ("node0", 29500)


def test_one_node_without_local_world_size_or_master() -> None:
    got = rank_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    assert (got.global_rank, got.local_world_size, got.master_addr) == (3, 4, None)
    with pytest.raises(LaunchError, match="set MASTER_ADDR and MASTER_PORT"):
        _ = got.rendezvous


def test_srun() -> None:
    got = rank_environment(SRUN)
    port = 20_000 + (31 * 4711 + 2) % 10_000
    assert got == RankEnvironment(5, 7, 1, 3, "gpu003", port, "srun", "slurm-4711.2.0")
    assert rank_environment({**SRUN, "SLURM_STEP_ID": "3"}).master_port == port + 1


def test_every_launcher_names_a_start() -> None:
    """One word for all ranks of a start, and another one each time that they are started."""
    assert rank_environment(TORCHRUN).start is None
    assert rank_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).start is None
    elastic = {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert rank_environment({**TORCHRUN, **elastic}).start == "job7.2"
    assert rank_environment({**SRUN, "SLURM_RESTART_COUNT": "1"}).start == "slurm-4711.2.1"
    for launcher in (SRUN, {**TORCHRUN, **elastic}):
        assert rank_environment({**launcher, "MEGASCALE_START": "word"}).start == "word"
    assert agent_environment({"MEGASCALE_START": "word"}).epoch == 0


def test_srun_with_the_usual_exports() -> None:
    usual = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345", "WORLD_SIZE": "7"}
    assert rank_environment({**SRUN, **usual}).rendezvous == ("10.0.0.1", 12345)


def test_the_steps_own_size_counts_before_the_allocations() -> None:
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu004",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "0",
    }
    got = rank_environment({**SRUN, **step})
    assert (got.global_rank, got.world_size, got.local_world_size) == (1, 2, 2)
    assert got.master_addr == "gpu004"


def test_a_step_of_one_task_is_no_rank_of_several() -> None:
    assert rank_environment({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) == RankEnvironment()


def test_torchrun_under_srun_wins() -> None:
    assert rank_environment({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_a_batch_script_is_no_rank() -> None:
    assert rank_environment(without(SRUN, "SLURM_STEP_ID")) == RankEnvironment()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(TORCHRUN, "RANK"), "incomplete: RANK not set beside WORLD_SIZE, LOCAL_RANK"),
        (without(TORCHRUN, "WORLD_SIZE"), "incomplete: WORLD_SIZE not set"),
        (without(TORCHRUN, "LOCAL_RANK"), "incomplete: LOCAL_RANK not set"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "several nodes; set LOCAL_WORLD_SIZE"),
        (without(TORCHRUN, "MASTER_PORT"), "set both or neither"),
        ({**TORCHRUN, "RANK": "eight"}, "RANK is 'eight'; it must be a whole number"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8; ranks go from 0"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "local rank 1 of 9"),
        ({**SRUN, "RANK": "5"}, "torchrun's variables are incomplete"),
        ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but srun started 7 tasks"),
        (without(SRUN, "SLURM_PROCID"), "incomplete: SLURM_PROCID not set"),
        (without(SRUN, "SLURM_NODELIST"), "incomplete: SLURM_NODELIST not set"),
        (without(SRUN, "SLURM_NODEID"), "incomplete: SLURM_NODEID not set"),
        ({**SRUN, "SLURM_TASKS_PER_NODE": "4,x"}, "expected a list such as"),
        ({**SRUN, "SLURM_TASKS_PER_NODE": "4"}, "does not describe 7 tasks"),
    ],
)
def test_partial_and_contradicting_sets_are_refused(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        rank_environment(variables)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[003-007,9],cpu1", "gpu003"),
        ("rack[2,4]-ib", "rack2-ib"),
        ("a-b-10", "a-b-10"),
    ],
)
def test_first_slurm_node(nodelist: str, first: str) -> None:
    assert first_slurm_node(nodelist) == first


def test_an_empty_node_list_is_refused() -> None:
    with pytest.raises(LaunchError, match="names no node"):
        first_slurm_node("")


def test_agent_variables() -> None:
    assert agent_environment({"PATH": "x"}) == AgentEnvironment()
    given = {"MEGASCALE_PROGRESS_PAGE": "page", "MEGASCALE_EPOCH": "7"}
    assert agent_environment(given) == AgentEnvironment("page", 7)
    assert agent_environment({"MEGASCALE_FAULT": "orders"}).fault_orders == "orders"
    assert agent_environment({"MEGASCALE_MEMORY_SLOTS": "/m/slots"}).memory_slots == "/m/slots"
    assert agent_environment({"MEGASCALE_RESUME": "disk"}).from_disk
    with pytest.raises(LaunchError, match="unknown variable MEGASCALE_EPOHC; known: MEGASCALE_EPO"):
        agent_environment({"MEGASCALE_EPOHC": "7"})


def test_a_drivers_token_file() -> None:
    assert driver_token_file({}) is driver_token_file({"MEGASCALE_TOKEN_FILE": ""}) is None
    assert driver_token_file({"MEGASCALE_TOKEN_FILE": "run/driver/token"}) == Path(
        "run/driver/token"
    )
    assert agent_environment({"MEGASCALE_TOKEN_FILE": "x"}) == AgentEnvironment(), "it is no rank's"


def test_multicast() -> None:
    own = {"HOME": "h", "NCCL_NVLS_ENABLE": "1"}
    assert not multicast_is_off({**MULTICAST_OFF, **own})
    switch_multicast_off(own)
    assert multicast_is_off(own)
    assert not multicast_is_off({"NCCL_NVLS_ENABLE": "0"})
    assert own == {"HOME": "h", **MULTICAST_OFF}
    child = child_environment({"RANK": "1"}, {"HOME": "h", "NCCL_NVLS_ENABLE": "1", "RANK": "0"})
    assert child == {"HOME": "h", "RANK": "1", **MULTICAST_OFF}


def test_a_free_port_is_one_that_nobody_has_and_the_kernel_gives_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as other, socket.socket() as own:
        other.bind(("127.0.0.1", free_port()))
        taken = other.getsockname()[1]
        assert 20_000 <= taken < 30_000
        other.listen()
        monkeypatch.setattr(env, "_PORTS", range(taken, taken + 1))
        with pytest.raises(LaunchError, match=f"none of the ports {taken} to {taken} "):
            free_port()
        monkeypatch.setattr(env, "_PORTS", range(taken, taken + 3))
        own.bind(("127.0.0.1", free_port()))
        assert own.getsockname()[1] in (taken + 1, taken + 2)


def test_versions_of_absent_packages_are_absent() -> None:
    assert set(installed_versions(["pydantic", "no-such-package"])) == {"pydantic"}


def test_env_is_the_only_reader_of_the_environment() -> None:
    root = Path(megascale.__file__).parent
    # Setting a library's variable before its first use is not reading.
    # /proc/PID/environ is another process's, and a word in backticks is prose.
    reader = re.compile(r"(?<![/\"`])\b(environb?\b(?!\[[^]]*\] = )|getenvb?\b)")
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in sorted(root.rglob("*.py"))
        if path != root / "env.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reader.search(line.partition("#")[0])
    ]
    assert found == []
