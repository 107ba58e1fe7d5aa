"""Plans of random layouts: who reads, what is sent, which rounds; in one process, against values.

The simulation keeps every value of a file as one number and moves it as the plans say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.checkpoint.layout import Entry
from megascale.checkpoint.reading.plan import (
    Limits,
    Needs,
    RankPlan,
    choose_readers,
    plan_rank,
)
from megascale.checkpoint.reading.saved import Saved, Want, digest
from megascale.errors import CheckpointError
from megascale.shards import Box

ITEM = 4  # bytes of a float32
SHAPES = {"master/a": (6, 5), "master/b": (7,), "exp_avg/a": (6, 5), "count/n": ()}


def _cut(num: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < num}), num]
    return list(pairwise(edges))


@st.composite
def _tilings(draw: st.DrawFn, num_ranks: int) -> list[list[Want]]:
    """Every tensor cut into rectangles, each of them at one rank at least."""
    cuts = st.lists(st.integers(0, 7), max_size=2)
    by_rank: list[list[Want]] = [[] for _ in range(num_ranks)]
    for key, shape in SHAPES.items():
        rows = _cut(shape[0], draw(cuts)) if shape else [(0, 1)]
        cols = _cut(shape[1], draw(cuts)) if len(shape) > 1 else [(0, 1)]
        for top, bottom in rows:
            for left, right in cols:
                offset, size = (top, left)[: len(shape)], (bottom - top, right - left)[: len(shape)]
                owners = st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=2)
                for rank in sorted(draw(owners)):
                    by_rank[rank].append(Want(key, shape, Box(offset, size)))
    return by_rank


def _files(tiling: list[list[Want]]) -> dict[int, list[Entry]]:
    """What each rank writes: pieces that several have are written by the first."""
    written: set[Want] = set()
    files: dict[int, list[Entry]] = {}
    for rank, wants in enumerate(tiling):
        start = 0
        files[rank] = []
        for want in wants:
            if want not in written:
                written.add(want)
                files[rank].append(Entry(*want, torch.float32, start))
                start = files[rank][-1].stop
    return files


def _numbers(want: Want) -> torch.Tensor:
    """Every element of a tensor has its own: its place in the whole."""
    base = 100.0 * list(SHAPES).index(want.key)
    whole = base + torch.arange(max(1, torch.Size(want.global_shape).numel())).float()
    whole = whole.view(want.global_shape)
    for axis, (start, length) in enumerate(zip(want.box.offset, want.box.shape, strict=True)):
        whole = whole.narrow(axis, start, length)
    return whole


def _plans(
    files: dict[int, list[Entry]], wanted: list[list[Want]], limits: Limits
) -> list[RankPlan]:
    needs = Needs(Saved(files), limits)
    for rank, wants in enumerate(wanted):
        for piece, want in enumerate(wants):
            needs.add(rank, piece, want)
    readers = choose_readers(needs)
    for block, reader in readers.items():
        assert needs.num_bytes[block][reader] == max(needs.num_bytes[block].values())
    return [plan_rank(needs, readers, rank) for rank in range(len(wanted))]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), num_files=st.integers(1, 3), num_ranks=st.integers(1, 4))
def test_plans_bring_every_value_to_its_place(
    data: st.DataObject, num_files: int, num_ranks: int
) -> None:
    files = _files(data.draw(_tilings(num_files)))
    wanted = data.draw(_tilings(num_ranks))
    block = data.draw(st.sampled_from([4, 12, 32, 1000]))
    limits = Limits(block, 2 * block)
    plans = _plans(files, wanted, limits)
    blocks = {
        file: torch.cat([_numbers(Want(e.key, e.global_shape, e.box)).reshape(-1) for e in entries])
        for file, entries in files.items()
        if entries
    }
    targets = [[torch.full(want.box.shape, -1.0) for want in wants] for wants in wanted]

    def deliver(rank: int, block_id: tuple[int, int], parts: Sequence[object]) -> None:
        file, index = block_id
        values = blocks[file][index * block // ITEM : (index + 1) * block // ITEM]
        for part in parts:
            saved = values[part.start // ITEM :][: torch.Size(part.shape).numel()]  # type: ignore[attr-defined]
            source = _narrow(saved.view(part.shape), part.source)  # type: ignore[attr-defined]
            target = _narrow(targets[rank][part.piece], part.target)  # type: ignore[attr-defined]
            assert bool((target == -1).all()), "written twice"
            target.copy_(source)

    read: Counter[tuple[int, int]] = Counter()
    sent, received = [], []
    for rank, plan in enumerate(plans):
        for read_of in plan.reads():
            read[read_of.block] += 1
            deliver(rank, read_of.block, read_of.own)
            sent += [(rank, q, read_of.block, parts) for q, parts in read_of.sends]
        for turn in plan.rounds:
            for receive in turn.receives:
                deliver(rank, receive.block, receive.parts)
                received.append((receive.reader, rank, receive.block, receive.parts))
            assert len(turn.reads) * block <= limits.round_bytes
            incoming = sum(part.num_bytes for r in turn.receives for part in r.parts)
            assert incoming <= limits.round_bytes
        assert not any(read_of.sends for read_of in plan.alone)
    assert sorted(sent, key=repr) == sorted(received, key=repr)
    num_blocks = {file: -(-len(values) * ITEM // block) for file, values in blocks.items()}
    everything = {(file, index) for file, num in num_blocks.items() for index in range(num)}
    assert dict(read) == dict.fromkeys(everything, 1)
    for wants, got in zip(wanted, targets, strict=True):
        for want, tensor in zip(wants, got, strict=True):
            assert torch.equal(tensor, _numbers(want)), want
    _run_in_rounds(plans)


def _run_in_rounds(plans: list[RankPlan]) -> None:
    """Ranks that go on only when all that a round waits for has been posted: none is left."""
    at = [0] * len(plans)
    posted: set[tuple[int, int, tuple[int, int]]] = set()
    taken: set[tuple[int, int, tuple[int, int]]] = set()
    entered = [-1] * len(plans)
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            if at[rank] == len(plan.rounds):
                continue
            turn = plan.rounds[at[rank]]
            out = {(rank, q, read.block) for read in turn.reads for q, _ in read.sends}
            if entered[rank] < at[rank]:
                entered[rank] = at[rank]
                posted |= out
                taken |= {(r.reader, rank, r.block) for r in turn.receives}
                moved = True
            incoming = {(r.reader, rank, r.block) for r in turn.receives}
            if incoming <= posted and out <= taken:
                at[rank] += 1
                moved = True
    assert at == [len(plan.rounds) for plan in plans]


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor


def _matrix(key: str, rows: int, cols: int, top: int, num: int) -> Want:
    return Want(key, (rows, cols), Box((top, 0), (num, cols)))


def test_what_all_need_is_read_by_all_in_turn() -> None:
    """64 blocks that four ranks need alike: 16 each, and every rank is sent the other 48."""
    files = {0: [Entry("master/a", (64, 4), Box((0, 0), (64, 4)), torch.float32, 0)]}
    plans = _plans(files, [[_matrix("master/a", 64, 4, 0, 64)]] * 4, Limits(16, 64))
    assert [len(list(plan.reads())) for plan in plans] == [16] * 4
    for plan in plans:
        assert sum(len(turn.receives) for turn in plan.rounds) == 48
        assert len(plan.rounds) in (12, 13)  # four blocks can be received in one


def test_a_rank_reads_what_it_needs_most_of_and_sends_the_rest() -> None:
    """Rows 0-5 of 10 at rank 0, 6-9 at rank 1; blocks of 4 rows."""
    files = {0: [Entry("master/a", (10, 4), Box((0, 0), (10, 4)), torch.float32, 0)]}
    wanted = [[_matrix("master/a", 10, 4, 0, 6)], [_matrix("master/a", 10, 4, 6, 4)]]
    first, second = _plans(files, wanted, Limits(64, 64))
    assert [read.block for read in first.reads()] == [(0, 1), (0, 0)]  # what is shared goes first
    assert [read.block for read in second.reads()] == [(0, 2)]
    ((receiver, (part,)),) = first.rounds[0].reads[0].sends
    assert (receiver, part.source, part.target) == (
        1,
        Box((2, 0), (2, 4)),
        Box((0, 0), (2, 4)),
    )
    assert second.rounds[0].receives[0].parts == (part,)


def test_entries_are_found_by_rows() -> None:
    entries = [Entry("a", (100, 4), Box((n, 0), (1, 4)), torch.float32, 16 * n) for n in range(100)]
    saved = Saved({0: entries[::2], 1: entries[1::2]})
    want = _matrix("a", 100, 4, 10, 3)
    found = [(file, common.offset[0]) for file, _, common in saved.overlapping(want)]
    assert found == [(0, 10), (1, 11), (0, 12)]
    assert saved.covers(want)
    assert not Saved({0: entries[::2]}).covers(want)
    assert not list(saved.overlapping(Want("b", (1,), Box((0,), (1,)))))


def test_files_that_lack_a_part_are_refused() -> None:
    entries = [Entry("master/a", (4, 4), Box((0, 0), (3, 4)), torch.float32, 0)]
    with pytest.raises(CheckpointError, match="x: its files do not hold all of 'master/a'"):
        Saved({0: entries}).refuse_another_model([_matrix("master/a", 4, 4, 2, 2)], "x")


def test_digests_of_wants_tell_them_apart() -> None:
    wants = [_matrix("a", 4, 4, 0, 2), _matrix("a", 4, 4, 2, 2)]
    digests = {digest(wants), digest(wants[::-1]), digest(wants[:1]), digest([])}
    assert len(digests) == 4
    assert digest(list(wants)) == digest(wants)
