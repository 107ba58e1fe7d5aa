"""Collectives over symmetric memory: kernels in the interpreter, on ranks that share an arena."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.problem import Problem
from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.config import DEFAULT, Sums, candidates
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks
from tests.flux.ahead_of_time import TARGETS, ptx
from tests.flux.shared_arena import SharedArena, interpret_kernels

pytestmark = pytest.mark.full  # processes and the interpreter: half a minute together

EIGHT = pytest.param(8, marks=pytest.mark.slow)  # more ranks than this machine has cores
# With many shapes: three ranks divide few of them.
WORLDS = [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4, 8))]
FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
# rows of all ranks, columns, type: one, fewer rows than ranks, odd ones, more than a block
FEW = [(1, 1, FP16), (2, 7, FP32), (5, 33, BF16)]
MANY = [
    *FEW,
    (1, 40, FP32),
    (2, 7, FP16),
    (3, 32, BF16),
    (7, 64, FP16),
    (13, 33, FP32),
    (16, 160, BF16),
]


TRANSPORTS: tuple[Any, ...] = ("in_band", "flags", "copy_engine", None)


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers with zeros of both signs among them: the words that in-band must not send."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).flatten()
    x[::5] = 0.0
    x[2::7] = -0.0
    return x.view(shape).to(dtype)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """The sum as the kernels make it: fp32, rank 0 first."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total = total + part.float()
    return total


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal to `wanted` (fp32) in found's type; the interpreter cuts bf16 instead of rounding."""
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-30)
    else:
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=0, atol=0)


WAYS = {  # in which a sum travels
    "in band": Sums(in_band=True),
    "flags": Sums(in_band=False),
    "roles": Sums(pushers=2),
    "default": DEFAULT,
}


_BLOCK = 32


def _tiny_flag_pieces(elements: int, *_args: Any) -> sizes.Pieces:
    return sizes.Pieces(_BLOCK, 1, 2, -(-elements // (2 * 2 * _BLOCK)), 2)


def in_tiny_pieces() -> None:
    """From here on, in this rank: several programs, rounds, and blocks of each."""

    def words(elements: int, *_args: Any) -> sizes.Pieces:
        return sizes.Pieces(_BLOCK, 1, 2, 1, -(-elements // (2 * _BLOCK)))

    def roles(elements: int, _size: int, pushers: int, _most: int) -> sizes.Pieces:
        return sizes.Pieces(_BLOCK, 1, pushers + 3, 1, -(-elements // _BLOCK), pushers)

    sizes.flag_pieces = _tiny_flag_pieces  # type: ignore[assignment]
    sizes.in_band_pieces, sizes.role_pieces = words, roles  # type: ignore[assignment]


def _arena(jitter_s: float = 0.0) -> SharedArena:
    interpret_kernels()
    assert dist.group.WORLD is not None
    return SharedArena(dist.group.WORLD, 1 << 14, num_sms=5, jitter_s=jitter_s)


def _all_reduces(rank: int, world_size: int, cases: list[Any], tiny: bool) -> list[Any]:
    arena = _arena()
    if tiny:
        in_tiny_pieces()
    from megascale.flux.symmetric.all_reduce import all_reduce

    def one(config: Any, seed: int, shape: tuple[int, int], dtype: torch.dtype) -> list[float]:
        parts = [values(seed + r, shape, dtype) for r in range(world_size)]
        before = parts[rank].clone()
        y = all_reduce(parts[rank], arena, config=config, view=seed % 2 == 1)
        for of_last, wanted in kept:
            assert torch.equal(of_last.view(torch.int8), wanted)
        kept[:] = [(y, y.view(torch.int8).clone())]
        assert torch.equal(parts[rank], before)
        close(y, in_rank_order(parts))
        bits = y.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        return bits.flatten().tolist()

    found = []
    kept: list[tuple[Tensor, Tensor]] = []  # of the last call: views hold for one more
    for seed, (m, n, dtype) in enumerate(cases):
        hops = [(way, shots) for way in WAYS.values() for shots in (1, 2)]
        ways = [replace(w, shots=shots) for w, shots in hops if w.pushers is None or shots == 1]
        found += [one(way, 100 * seed, (m, n), dtype) for way in ways]
        found.append(one(Sums(in_band=False, shots=2), 100 * seed + 51, (m, n), dtype))
    assert all_reduce(torch.empty(0, 3), arena).shape == (0, 3)
    assert arena.turns == (0 if world_size == 1 else len(found))
    return found


def _check_all_reduce(world_size: int, cases: list[Any], *, tiny: bool) -> None:
    first, *others = run_ranks(_all_reduces, world_size, cases, tiny, timeout_s=110)
    assert len(first) == 8 * len(cases)
    for other in others:
        assert other == first


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, EIGHT])
def test_all_reduce_sums_in_rank_order_to_the_same_bits(world_size: int) -> None:
    _check_all_reduce(world_size, FEW, tiny=True)


@pytest.mark.full
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_reduce_of_many_shapes(world_size: int) -> None:
    _check_all_reduce(world_size, MANY, tiny=False)


@pytest.mark.slow
def test_all_reduce_of_many_shapes_in_tiny_pieces() -> None:
    _check_all_reduce(3, MANY, tiny=True)


def _reduce_scatters(
    rank: int, world_size: int, cases: list[Any], jitter_s: float, tiny: bool = True
) -> None:
    arena = _arena(jitter_s)
    if tiny:
        in_tiny_pieces()
    from megascale.flux.symmetric.reduce_scatter import reduce_scatter

    for seed, (m, columns, dtype) in enumerate(cases):
        first, end = shard_rows(m, world_size, rank)
        for way in (*WAYS, "copies"):
            parts = [values(100 * seed + r, (m, columns), dtype) for r in range(world_size)]
            wanted = in_rank_order(parts)[first:end]
            options: dict[str, Any] = {"config": WAYS.get(way)}
            y_tD = reduce_scatter(parts[rank], arena, copy_engine=way == "copies", **options)
            assert y_tD.shape == wanted.shape
            close(y_tD, wanted)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter(world_size: int) -> None:
    run_ranks(_reduce_scatters, world_size, FEW, 0.0)


def _chunks(rank: int, world_size: int) -> None:
    arena = _arena()
    from megascale.flux.symmetric.reduce_scatter import reduce_scatter

    sizes.CHUNK_BYTES = 64
    for m in (1, 5, 12, 23):
        parts = [values(m + 100 * r, (m, 24), torch.float16) for r in range(world_size)]
        first, end = shard_rows(m, world_size, rank)
        y_tD = reduce_scatter(parts[rank], arena, copy_engine=True)
        close(y_tD, in_rank_order(parts)[first:end])


def test_reduce_scatter_by_copies_in_chunks() -> None:
    assert sizes.chunks(10 * 24 * 2, 5) == 1
    run_ranks(_chunks, 3)


def _all_gathers(rank: int, world_size: int, cases: list[Any], jitter_s: float) -> None:
    arena = _arena(jitter_s)
    sizes.flag_pieces = _tiny_flag_pieces  # type: ignore[assignment]
    from megascale.flux.symmetric.all_gather import all_gather

    before: list[tuple[Tensor, Tensor]] = []  # of the last call
    for seed, (m, columns, dtype) in enumerate(cases):
        for transport in TRANSPORTS:
            if transport == "in_band" and columns * dtype.itemsize % 4:
                continue
            x_TD = (values(seed, (m, columns), FP32) * 20).to(dtype)
            first, end = shard_rows(m, world_size, rank)
            found = all_gather(x_TD[first:end], arena, m, transport=transport)
            for value, wanted in [(found, x_TD), *before]:  # the last one's is still there
                assert value.shape == wanted.shape
                assert value.view(torch.int8).equal(wanted.view(torch.int8)), (m, transport)
            before = [(found, x_TD)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_moves_every_bit(world_size: int) -> None:
    cases = [*FEW, (4, 3, torch.int8), (3, 5, torch.float64)]
    run_ranks(_all_gathers, world_size, cases, 0.0)


def _no_rows(rank: int, world_size: int) -> None:
    arena = _arena()
    from megascale.flux.symmetric.all_gather import all_gather, start_all_gather
    from megascale.flux.symmetric.reduce_scatter import reduce_scatter

    assert all_gather(torch.empty(0, 8), arena).shape == (0, 8)
    assert start_all_gather(torch.empty(0, 8), arena).wait().shape == (0, 8)
    assert reduce_scatter(torch.empty(0, 8), arena).shape == (0, 8)
    assert arena.turns == 0


def test_nothing_is_sent_where_there_is_nothing() -> None:
    run_ranks(_no_rows, 2)


def _started(rank: int, world_size: int) -> None:
    arena = _arena(0.002)
    from megascale.flux.symmetric.all_gather import start_all_gather
    from megascale.flux.symmetric.all_reduce import all_reduce

    for call in range(9):
        m = 1 + 2 * call
        x_TD = values(call, (m, 12), torch.bfloat16)
        first, end = shard_rows(m, world_size, rank)
        gathering = start_all_gather(x_TD[first:end], arena, m)
        y = all_reduce(torch.full((4,), float(rank)), arena)
        assert torch.equal(y, torch.full((4,), float(sum(range(world_size)))))
        assert torch.equal(gathering.wait(), x_TD)
        assert gathering.wait() is gathering.wait()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gather_runs_beside_another_call(world_size: int) -> None:
    run_ranks(_started, world_size)


@pytest.mark.full
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("ranks", [_reduce_scatters, _all_gathers])
def test_many_shapes_with_ranks_out_of_step(ranks: Any, world_size: int) -> None:
    run_ranks(ranks, world_size, MANY, 0.004, timeout_s=110)


def test_a_launch_depends_on_all_that_its_key_says() -> None:
    from megascale.flux.symmetric.one_shot.launch import key_of

    here = {"rank": 0, "world_size": 4, "deadline_ns": 0, "num_sms": 132, "device": "cuda:0"}
    others = {"rank": 1, "world_size": 2, "deadline_ns": 5, "num_sms": 1, "device": "cuda:1"}
    arenas: list[Any] = [SimpleNamespace(**here)]
    arenas += [SimpleNamespace(**here | {name: other}) for name, other in others.items()]
    assert len({key_of(arena) for arena in arenas}) == len(arenas)


def _sums_of_parts(rank: int, world_size: int) -> None:
    arena = _arena()
    from megascale.flux.symmetric.launch import sum_parts, summing_arrived, wait_flags

    for c, columns, dtype in [(1, 1, FP32), (5, 24, FP16), (3, 2100, FP32), (9, 48, BF16)]:
        whole = values(c, (3, c, 2 * columns), dtype)
        parts, own = whole[:, :, :columns], values(9, (c, columns), dtype)  # rows with strides
        bias, wide = values(7, (columns,), dtype), torch.full((c, 3 * columns), -7.0, dtype=dtype)
        y_cN = sum_parts(wide[:, columns : 2 * columns], parts, own=own, rank=1, bias=bias)
        close(y_cN, in_rank_order([parts[0], own, parts[2]]) + bias.float())
        assert bool((wide[:, :columns] == -7).all() & (wide[:, 2 * columns :] == -7).all())
        close(sum_parts(y_cN.new_empty(c, columns), parts), in_rank_order(list(parts)))
        with arena.turn(1) as slot:  # flags of all parts have come: of every two rows, eight a rank
            slot.flags[rank][10:34] = 1
            flags = {"first_flag": 10, "flags_per_source": 8, "rows_per_flag": 2, "counter": 2}
            summing_arrived(y_cN, parts, arena, slot, own=parts[rank], bias=bias, **flags)()
            close(y_cN, in_rank_order(list(parts)) + bias.float())
            cleared = (slot.flags[rank][10:34] == 0).view(3, 8)
            assert not arena.done.any()
            wanted = [r != rank and f < -(-c // 2) for r in range(3) for f in range(8)]
            assert cleared.flatten().tolist() == wanted
            slot.flags[rank][10:34] = 1
            wait_flags(arena, slot, range(10, 34, 8), skip_own=False)
            assert slot.flags[rank].nonzero().flatten().tolist() == [
                flag for flag in range(10, 34) if flag not in (10, 18, 26)
            ]
            slot.flags[rank][:34] = 1
            wait_flags(arena, slot, range(34), per_source=12)  # those of this rank are left
            own_flags = range(12 * rank, min(12 * rank + 12, 34))
            assert slot.flags[rank].nonzero().flatten().tolist() == list(own_flags)
            slot.flags[rank].zero_()


def test_parts_are_summed_where_they_lie_and_flags_are_cleared() -> None:
    run_ranks(_sums_of_parts, 3)


def _refusals(rank: int, world_size: int) -> list[str]:
    arena = _arena()
    from megascale.flux.symmetric.all_gather import all_gather
    from megascale.flux.symmetric.all_reduce import all_reduce

    found = []
    for call in (
        lambda: all_reduce(torch.ones(2, 2, dtype=torch.int32), arena),
        lambda: all_reduce(torch.ones(2, 2, device="meta"), arena),
        lambda: all_gather(torch.ones(4), arena),
        lambda: all_gather(torch.ones(2, 2), arena, 7),
    ):
        with pytest.raises(FluxError) as caught:
            call()
        found.append(str(caught.value))
    assert arena.turns == 0  # refused before anything was begun
    return found


def test_refusals_name_the_argument() -> None:
    kind, device, dims, rows = run_ranks(_refusals, 2)[1]
    assert "torch.int32" in kind
    assert "torch.bfloat16" in kind
    assert "meta" in device
    assert "(4,)" in dims
    assert "num_rows is 7" in rows
    assert "rows 4 to 7" in rows


@pytest.mark.parametrize("world_size", [2, 4, 8, 72])
@pytest.mark.parametrize("elements", [1, 8192, 131072, 5_000_001, 400_000_000])
def test_pieces_cover_a_share_and_their_flags_fit(world_size: int, elements: int) -> None:
    for pieces in (
        sizes.flag_pieces(elements, 2, 2 * world_size, 65536),
        sizes.in_band_pieces(elements, 2),
        sizes.in_band_pieces(elements, 4),
    ):
        covered = pieces.programs * pieces.rounds * pieces.blocks * pieces.block
        assert covered >= elements
        assert covered - elements < pieces.programs * pieces.blocks * pieces.block
        assert pieces.warps <= 16
        assert pieces.programs <= sizes.MAX_PROGRAMS
    for pushers, most in ((1, 128), (32, 128), (32, 16), (5, 2)):
        pieces = sizes.role_pieces(elements, 2, pushers, most)
        assert pieces.blocks * pieces.block >= elements > (pieces.blocks - 1) * pieces.block
        assert 0 < pieces.pushers < pieces.programs <= most
        assert sizes.flag_pieces(elements, 2, 2 * world_size, 65536, most).programs <= most
        assert sizes.in_band_pieces(elements, 2, most).programs <= most
    pieces = sizes.flag_pieces(elements, 2, 2 * world_size, 65536)
    assert 2 * world_size * pieces.rounds * pieces.programs <= 65536
    assert pieces.programs <= sizes.MAX_PROGRAMS


def test_the_second_hop_pays_from_a_size_on_and_never_for_two_ranks() -> None:
    assert sizes.shots(1 << 30, 2) == 1
    assert [sizes.shots(size, 8) for size in (1 << 14, 1 << 17, 1 << 18, 1 << 20)] == [1, 1, 2, 2]
    assert sizes.fits_in_band(131072, 2, 1, 65536)
    assert not sizes.fits_in_band(131073, 2, 1, 65536)
    assert sizes.goes_in_band(131072, 2, 1, NUM_FLAGS)
    assert not sizes.goes_in_band(131073, 2, 1, NUM_FLAGS)


def _offered(op: Any, m: int, n: int, world_size: int = 2) -> list[Sums | None]:
    return candidates(Problem(op, m, n, 4096, world_size, BF16, "NK"))


def test_both_transports_are_offered_where_both_can_be() -> None:
    assert _offered("gemm_ar", 128, 12288)[:2] == [None, Sums(in_band=False)], "3 MB in 4"
    assert Sums(in_band=True) not in _offered("gemm_ar", 512, 12288)
    assert {Sums(pushers=16), Sums(shots=2)} <= set(_offered("gemm_ar", 512, 12288))
    assert _offered("gemm_ar", 4, 8192) == [None, Sums(in_band=False)]
    assert _offered("gemm_rs", 8, 8192) == [None, Sums(in_band=False)]
    assert _offered("gemm_rs", 1024, 16384)[0] is None
    assert _offered("gemm_rs", 16384, 16384) == [None], "copy engines"
    assert _offered("gemm_ar", 512, 8192, 1) == [None]
    assert Sums(shots=1) in _offered("gemm_ar", 512, 8192, 8), "two hops are the default"
    for world_size in (2, 4, 8):
        for m in (1, 16, 128, 512, 4096):
            for op in ("gemm_ar", "gemm_rs"):
                found = _offered(op, m, 8192, world_size)
                assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "wrong",
    [{"shots": 3}, {"pushers": 128}, {"pushers": 8, "in_band": True}, {"pushers": 8, "shots": 2}],
)
def test_options_that_contradict_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FluxError, match=next(iter(wrong))):
        Sums(**wrong)


def test_what_does_not_fit_in_band_is_refused() -> None:
    assert Sums(in_band=True).goes_in_band(2 * NUM_FLAGS, 2, 1)
    with pytest.raises(FluxError, match="do not fit into the 1048576 flag words"):
        Sums(in_band=True).goes_in_band(2 * NUM_FLAGS + 1, 2, 1)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("wait", [False, True])
def test_the_sum_of_parts_compiles_to_accesses_of_16_bytes(wait: bool, capability: int) -> None:
    from megascale.flux.symmetric.kernel import sum_parts_kernel

    names = ("columns", "stride_out", "stride_own", "stride_part", "stride_row")
    types = dict.fromkeys(("out_ptr", "parts_ptr", "own_ptr", "bias_ptr"), "*bf16:16")
    types |= dict.fromkeys(("flag_ptrs", "report_ptr"), "*i64:16") | {"done_ptr": "*i32:16"}
    types |= dict.fromkeys(names, "i32:16")
    types |= dict.fromkeys(("rows", "first_flag", "flags_per_source", "rows_per_flag"), "i32")
    constants = {"RANK": 1, "WORLD": 2, "HAS_OWN": True, "HAS_BIAS": True, "WAIT": wait}
    constants |= {"BLOCK_R": 2, "BLOCK_C": 2048, "BLOCK_F": 1, "DEADLINE_NS": 0}
    found = ptx(sum_parts_kernel, types, constants, capability, num_warps=8)
    loads = [x for x in found.splitlines() if "ld.global" in x and ".v4.b32" in x]
    assert len(loads) == 5  # two of each part, one of the bias
    assert found.count("st.global.v4.b32") == 2
    assert ("ld.acquire.sys" in found) == wait


def _symmetric_kernels() -> list[tuple[Any, str, dict[str, Any], int, int]]:
    """(kernel, element, constants, warps, accesses of 16 bytes at least) of everything launched."""
    from megascale.flux.symmetric.gather import kernel as gather
    from megascale.flux.symmetric.one_shot import kernel as one_shot
    from megascale.flux.symmetric.two_shot import kernel as two_shot

    large = {"BLOCK": 8192, "BLOCK_W": 4}
    return [
        (one_shot.sum_in_band_kernel, "bf16", {"BLOCK": 1024, "SCATTER": False}, 4, 4),
        (one_shot.sum_in_band_kernel, "fp32", {"BLOCK": 512, "SCATTER": True}, 4, 4),
        (one_shot.sum_by_flags_kernel, "bf16", {"SCATTER": False, **large}, 16, 8),
        (one_shot.sum_by_flags_kernel, "bf16", {"SCATTER": True, **large}, 16, 8),
        (one_shot.sum_by_roles_kernel, "bf16", {"SCATTER": False, **large, "BLOCKS": 4}, 16, 8),
        (one_shot.sum_by_roles_kernel, "fp16", {"SCATTER": True, **large, "BLOCKS": 4}, 16, 8),
        (two_shot.two_shot_in_band_kernel, "fp16", {"BLOCK": 1024}, 4, 8),
        (two_shot.two_shot_by_flags_kernel, "bf16", {**large, "VIEW": False}, 16, 12),
        (two_shot.two_shot_by_flags_kernel, "fp16", {**large, "VIEW": True}, 16, 10),
        (gather.gather_in_band_kernel, "i32", {"BLOCK": 512}, 4, 3),
        (gather.gather_by_flags_kernel, "i32", large, 16, 4),
    ]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("case", range(11))
def test_kernels_compile_to_accesses_of_16_bytes(case: int, capability: int) -> None:
    kernel, element, constants, warps, at_least = _symmetric_kernels()[case]
    constants = {**constants, "RANK": 1, "WORLD": 4, "DEADLINE_NS": 0}
    types = {name: "*i64:16" for name in kernel.arg_names if name.endswith("_ptrs")}
    types |= {name: "i32:16" for name in ("share", "total", "part") if name in kernel.arg_names}
    types |= {"x_ptr": f"*{element}:16", "y_ptr": f"*{element}:16", "report_ptr": "*i64:16"}
    counts = ("num_rounds", "blocks_a_round", "blocks_a_program", "blocks", "num_blocks", "pushers")
    types |= {name: "i32" for name in counts if name in kernel.arg_names}
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    found = ptx(kernel, types, constants, capability, num_warps=warps)
    for kind in ("ld", "st"):
        lines = [x for x in found.splitlines() if f"{kind}.global" in x or f"{kind}.volatile" in x]
        wide = [x for x in lines if ".v4.b32" in x or ".v2.b64" in x]
        assert wide, lines
        narrow = [x for x in lines if ".v" not in x and ".b16" in x]
        assert not narrow, narrow  # elements one by one
    assert found.count(".v4.b32") + found.count(".v2.b64") >= at_least
    debug = ptx(kernel, types, {**constants, "DEADLINE_NS": 1}, capability, num_warps=warps)
    assert "trap;" in debug
    assert "trap;" not in found
