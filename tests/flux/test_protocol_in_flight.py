"""The relay of a tile: every rank adds once and in order, every flag is set and awaited once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest
import torch

from megascale.flux.arena import NUM_FLAGS, NUM_SLOTS
from megascale.flux.gemm_config import HOPPER
from megascale.flux.gemm_reduce_scatter.in_flight.config import candidates, num_flags
from megascale.flux.gemm_reduce_scatter.in_flight.protocol import Relay
from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.problem import Problem
from megascale.flux.tiles import Tile, shard_rows
from tests.flux.grids import Program, Step, stuck
from tests.flux.relays import Relays

WORLDS = [1, 2, 3, 4, 8]
ROWS = [1, 2, 7, 8, 9, 16, 24, 33]


def _cases(world_size: int) -> Iterator[list[Relay]]:
    for num_rows in ROWS:
        for block_m in (1, 3, 4, 16):
            for group_m, tiles_n in ((1, 1), (2, 3), (8, 2)):
                yield _ranks(num_rows, world_size, block_m, tiles_n, group_m)


def _ranks(
    num_rows: int, world_size: int, block_m: int, tiles_n: int, group_m: int = 8
) -> list[Relay]:
    return [
        Relay(ScatterTiles(num_rows, world_size, rank, block_m, tiles_n, group_m))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_tile_passes_all_ranks_from_the_left_of_its_owner_round_to_it(world_size: int) -> None:
    for ranks in _cases(world_size):
        passed: dict[Tile, dict[int, int]] = {}
        for relay in ranks:
            for index in range(relay.tiles.num_tiles):
                tile = relay.tiles.tile_at(index)
                assert passed.setdefault(tile, {}).setdefault(relay.hop(index), -1) == -1
                passed[tile][relay.hop(index)] = relay.tiles.rank
                first = relay.hop(index) == 1 and world_size > 1
                assert relay.stores(index) == first, (relay, index)
                assert relay.tiles.is_own(index) == (relay.hop(index) == world_size)
        for tile, by_hop in passed.items():
            wanted = {hop: (tile.shard - hop) % world_size for hop in range(1, world_size + 1)}
            assert by_hop == wanted, (ranks[0], tile)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_flag_is_set_once_and_waited_for_once(world_size: int) -> None:
    for ranks in _cases(world_size):
        was_set: Counter[tuple[int, int]] = Counter()
        waited: Counter[tuple[int, int]] = Counter()
        for relay in ranks:
            for index in range(relay.tiles.num_tiles):
                told, wait = relay.told_by(index), relay.wait_of(index)
                was_set.update([] if told is None else [told])
                waited.update([] if wait is None else [(relay.tiles.rank, wait)])
        assert was_set == waited, ranks[0]
        assert set(was_set.values()) <= {1}, ranks[0]
        for relay in ranks:
            own = {flag for owner, flag in waited if owner == relay.tiles.rank}
            assert own == set(range(relay.num_flags)), "of every hop, also on a rank without rows"


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_flag_says_that_the_rank_before_is_done_with_the_same_tile(world_size: int) -> None:
    for ranks in _cases(world_size):
        told = {
            relay.told_by(index): (relay.tiles.tile_at(index), relay.hop(index), relay.tiles.rank)
            for relay in ranks
            for index in range(relay.tiles.num_tiles)
        }
        for relay in ranks:
            for index in range(relay.tiles.num_tiles):
                wait = relay.wait_of(index)
                if wait is None:
                    assert relay.hop(index) == 1
                    continue
                right = (relay.tiles.rank + 1) % world_size
                wanted = (relay.tiles.tile_at(index), relay.hop(index) - 1, right)
                assert told[relay.tiles.rank, wait] == wanted, (relay, index)


@pytest.mark.parametrize("world_size", WORLDS)
def test_places_in_a_slot_are_of_one_tile_and_fill_the_shard(world_size: int) -> None:
    for ranks in _cases(world_size):
        for owner in ranks:
            written: Counter[tuple[int, int]] = Counter()
            for relay in ranks:
                for index in range(relay.tiles.num_tiles):
                    tile = relay.tiles.tile_at(index)
                    if tile.shard == owner.tiles.rank and not relay.tiles.is_own(index):
                        first, rows = relay.slot_row(tile), len(relay.tiles.rows_of(tile))
                        assert not rows or first + rows <= owner.slot_bytes(1)
                        written.update((first + row, tile.tile_n) for row in range(rows))
            start, end = shard_rows(owner.tiles.num_rows, world_size, owner.tiles.rank)
            wanted = {(r, n) for r in range(end - start) for n in range(owner.tiles.tiles_n)}
            assert written == Counter(
                dict.fromkeys(wanted, world_size - 1) if world_size > 1 else {}
            )


def _programs(relay: Relay, grid: int) -> list[Program]:
    steps = []
    for index in range(relay.tiles.num_tiles):
        wait, told = relay.wait_of(index), relay.told_by(index)
        waits = [] if wait is None else [(relay.tiles.rank, wait)]
        steps.append(Step(waits, [] if told is None else [told]))
    return [steps[program::grid] for program in range(grid)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_grids_of_any_size_end(world_size: int) -> None:
    for num_rows, block_m in ((1, 4), (16, 2), (33, 4), (40, 8)):
        ranks = _ranks(num_rows, world_size, block_m, 2)
        for grid in range(1, ranks[0].tiles.num_tiles + 3):
            for seed in (None, 0, 1):
                assert not stuck([_programs(relay, grid) for relay in ranks], seed=seed), grid


def test_grids_of_different_sizes_end() -> None:
    """A rank may leave more SMs to others than its peers do."""
    for world_size in (3, 4):
        ranks = _ranks(33, world_size, 2, 2)
        for grids in ((1, 2, 7, 3), (5, 1, 3, 40), (40, 2, 1, 1)):
            programs = [_programs(relay, g) for relay, g in zip(ranks, grids, strict=False)]
            assert not stuck(programs, seed=3)


def test_a_grid_must_be_resident() -> None:
    programs = [_programs(relay, 3) for relay in _ranks(16, 2, 2, 1)]
    assert stuck(programs, resident=1)


def test_hops_in_another_order_would_be_a_deadlock() -> None:
    for world_size in (2, 3):
        ranks = _ranks(16, world_size, 4, 1)
        turned = [[p[::-1] for p in _programs(relay, 2)] for relay in ranks]
        assert stuck(turned)


Kind = Literal["relay", "exchange"]
RELAY: Sequence[Kind] = ["relay"]
MIXED: Sequence[Kind] = ["relay", "exchange"]


def _calls(pattern: Sequence[Kind], count: int) -> list[Kind]:
    return [pattern[i % len(pattern)] for i in range(count)]


@pytest.mark.parametrize("pattern", [RELAY, MIXED], ids=["relays", "other forms between"])
@pytest.mark.parametrize(("world_size", "tiles", "count"), [(2, 2, 8), (3, 1, 5), (3, 2, 2)])
def test_turns_of_slots_hold(
    world_size: int, tiles: int, count: int, pattern: Sequence[Kind]
) -> None:
    """In every interleaving: no tile or flag of one call meets another call's, tiles are complete
    and in order when their owner takes them, what an exchange received stays for two calls."""
    model = Relays(world_size, _calls(pattern, count), NUM_SLOTS, tiles, hold=2)
    assert model.violation() is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_slot_would_not_do(world_size: int) -> None:
    found = Relays(world_size, _calls(RELAY, 3), 1).violation()
    assert found is not None
    assert "overwrites what" in found or "that is set" in found
    assert Relays(world_size, _calls(RELAY, 3), 2).violation() is None


def test_whoever_does_not_wait_for_its_turn_breaks_the_order() -> None:
    found = Relays(3, _calls(RELAY, 1), NUM_SLOTS, patient=False).violation()
    assert found is not None
    assert "not in the order" in found


def test_two_ranks_have_no_turn_to_wait_for() -> None:
    assert Relays(2, _calls(RELAY, 4), NUM_SLOTS, patient=False).violation() is None


@pytest.mark.parametrize("world_size", [2, 3, 8, 72])
def test_large_cases_stay_in_their_memory(world_size: int) -> None:
    for num_rows in (1, 127, 1000, 4097, 32768):
        for block_m in (64, 128):
            relay = Relay(ScatterTiles(num_rows, world_size, world_size - 1, block_m, 3))
            assert relay.slot_bytes(1) * world_size - num_rows < world_size
            last = relay.wait_of(relay.tiles.num_tiles - 1)
            assert last is not None
            assert last < relay.num_flags


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("m", [64, 8192, 1 << 18])
def test_candidates_have_flags_and_the_kernel_counts_them_alike(m: int, world_size: int) -> None:
    problem = Problem("gemm_rs", m, 8192, 4096, world_size, torch.bfloat16, "NK")
    found = candidates(problem, HOPPER)
    assert len(set(found)) == len(found)
    for config in found:
        tiles_n = -(-problem.n // config.block_n)
        relay = Relay(ScatterTiles(m, world_size, 0, config.block_m, tiles_n, config.group_m))
        flags = num_flags(problem.rows_a_rank, problem.n, world_size, config)
        assert flags == relay.num_flags
        assert flags <= NUM_FLAGS
