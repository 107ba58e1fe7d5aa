"""Whether a group can run kernels: a function of what its ranks say, equal on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.errors import ConfigError
from megascale.flux import choose_mode, machine, why_not_fused
from megascale.flux.machine import RankFacts, obstacle
from tests.distributed import run_ranks

UUIDS = ("a", "b", "c", "d")
GOOD = [
    RankFacts("cuda", "node0", "NVIDIA H200", uuid, (9, 0), frozenset(UUIDS) - {uuid})
    for uuid in UUIDS
]


def _changed(rank: int, **changes: Any) -> list[RankFacts]:
    return [replace(facts, **changes) if r == rank else facts for r, facts in enumerate(GOOD)]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (GOOD, None),
        ([replace(facts, capability=(8, 0)) for facts in GOOD], None),
        (_changed(2, device_type="cpu"), "rank 2 computes on cpu; the kernels need CUDA"),
        (_changed(1, has_triton=False), "rank 1 cannot import triton"),
        (
            _changed(3, capability=(10, 0)),
            "rank 3 has NVIDIA H200 of compute capability 10.0; the kernels were tried on 8.0, 9.0",
        ),
        (_changed(1, multicast_off=False), "NVLink multicast is not switched off on rank 1; call "),
        (_changed(2, host="node1"), "rank 0 is on node0 and rank 2 on node1"),
        (_changed(3, uuid="b"), "ranks 1 and 3 share a GPU"),
        (
            _changed(1, capability=(8, 0), name="NVIDIA A100"),
            "rank 0 has NVIDIA H200 and rank 1 has NVIDIA A100",
        ),
        (
            _changed(2, reachable=frozenset({"a", "b"})),
            "the GPU of rank 2 has no peer access to the GPU of rank 3",
        ),
    ],
)
def test_the_reason_names_the_rank_and_what_it_lacks(
    ranks: Sequence[RankFacts], reason: str | None
) -> None:
    found = obstacle(ranks)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(reason)


def _asked(rank: int, world_size: int) -> list[str | None]:
    """All ranks answer what rank 1 alone lacks; the exchange is made once."""
    exchanges = []
    gather = dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        exchanges.append(args)
        gather(*args, **kwargs)

    dist.all_gather_object = counted
    mine = replace(GOOD[rank], has_triton=rank != 1)
    vars(machine)["describe"] = lambda _device: mine
    group, other = dist.group.WORLD, dist.new_group(list(range(world_size)))
    assert group is not None
    device = torch.device("cuda", rank)
    answers = [why_not_fused(g, device) for g in (group, group, other)]
    assert len(exchanges) == 2
    return answers


def test_all_ranks_get_one_answer() -> None:
    answers = {answer for found in run_ranks(_asked, 2) for answer in found}
    (answer,) = answers
    assert answer is not None
    assert answer.startswith("rank 1 cannot import triton")


def test_a_cpu_needs_no_exchange() -> None:
    class Nobody:
        group_name = "nobody"

    group: Any = Nobody()
    assert (
        why_not_fused(group, torch.device("cpu"))
        == "this rank computes on cpu; the kernels need CUDA devices"
    )


# ---------------------------------------------------------------- parallelism.flux


@pytest.mark.parametrize(
    ("asked", "beside", "reserve_sms", "obstacle", "wanted"),
    [
        ("auto", False, 0, None, ("auto", True, "auto (the fastest for each shape)")),
        ("auto", True, 0, None, ("auto", False, "chunked (NCCL transfers may be pending")),
        ("auto", True, 16, None, ("auto", True, "auto (the fastest")),
        ("auto", True, 0, "no GPU", ("reference", True, "reference (no GPU)")),
        ("fused", False, 0, None, ("fused", True, "fused (asked for)")),
        ("fused", True, 16, None, ("fused", True, "fused (asked for)")),
        ("chunked", False, 0, None, ("chunked", True, "chunked (asked for)")),
        ("chunked", True, 0, None, ("chunked", False, "chunked (asked for)")),
        ("reference", True, 0, "no GPU", ("reference", True, "reference (asked for)")),
    ],
)
def test_the_mode_of_a_run(
    asked: Any, beside: bool, reserve_sms: int, obstacle: str | None, wanted: tuple[str, bool, str]
) -> None:
    found = choose_mode(asked, obstacle=obstacle, nccl_beside=beside, reserve_sms=reserve_sms)
    assert (found.mode, found.spin) == wanted[:2]
    assert str(found).startswith(wanted[2])


@pytest.mark.parametrize(
    ("asked", "beside", "obstacle", "message"),
    [
        ("fused", False, "x is on cpu", 'parallelism.flux is "fused", and x is on cpu'),
        ("chunked", True, "x is on cpu", 'parallelism.flux is "chunked", and x is on cpu'),
        ("fused", True, None, "set parallelism.flux_reserve_sms to the thread blocks of all NCCL"),
    ],
)
def test_what_cannot_be_had_is_refused(
    asked: Any, beside: bool, obstacle: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_mode(asked, obstacle=obstacle, nccl_beside=beside)
