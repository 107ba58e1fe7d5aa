"""What all ranks raise, of what each of them told."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.reading.messages import Messages
from megascale.checkpoint.reading.outcome import Agreement, Kind, Outcome, judge
from megascale.checkpoint.reading.window import DamagedError
from megascale.errors import CheckpointError
from tests.distributed import run_ranks

GOOD = Outcome(Kind.GOOD)
STOPPED = Outcome(Kind.STOPPED, "rank 1 stopped")


def test_good_if_all_are() -> None:
    assert judge({0: GOOD, 1: GOOD}, {}, 2) == GOOD


def test_the_gravest_is_told_with_its_rank() -> None:
    damaged = Outcome(Kind.DAMAGED, "f is damaged")
    assert judge({0: GOOD, 1: damaged, 2: STOPPED, 3: damaged}, {}, 4) == Outcome(
        Kind.DAMAGED, "rank 1 of 4: f is damaged (and 1 ranks more)"
    )
    failed = Outcome(Kind.FAILED, "the disk is gone")
    assert judge({0: STOPPED, 1: damaged, 2: failed}, {}, 3) == Outcome(
        Kind.FAILED, "rank 2 of 3: the disk is gone"
    )


def test_who_is_silent_comes_first() -> None:
    silent = Outcome(Kind.MISSES, "rank 2 of 3 is gone", 2)
    assert judge({0: GOOD, 1: STOPPED}, {2: silent}, 3) == Outcome(
        Kind.FAILED, "rank 2 of 3 is gone"
    )


def test_a_miss_of_one_that_told_its_outcome_gives_way_to_it() -> None:
    miss = Outcome(Kind.MISSES, "rank 2 of 3 said nothing", 2)
    slow = Outcome(Kind.FAILED, "f was not read in time")
    assert judge({0: miss, 1: GOOD, 2: slow}, {}, 3).text == "rank 2 of 3: f was not read in time"
    assert judge({0: miss, 1: GOOD, 2: GOOD}, {}, 3) == Outcome(Kind.FAILED, miss.text)


def test_a_message_holds_it_all() -> None:
    outcome = Outcome(Kind.MISSES, "größer", 70000)
    assert Outcome.decode(outcome.encode()) == outcome
    long = Outcome(Kind.FAILED, "ä" * 5000)
    assert Outcome.decode(long.encode()).text == "ä" * 1021
    with pytest.raises(DamagedError, match="f"):
        Outcome(Kind.DAMAGED, "f").raise_if_bad()
    with pytest.raises(CheckpointError, match="f"):
        Outcome(Kind.FAILED, "f").raise_if_bad()
    GOOD.raise_if_bad()


def _slow(rank: int, world_size: int, slow_rank: int) -> list[str]:
    """One rank reads longer than the others' patience, and says that it does. Twice, so
    that what was said in one load would be heard in the next."""
    told = []
    for text in ("first", "second"):
        messages = Messages(Ranks(dist.group.WORLD), 1.0)
        agreement = Agreement(messages)
        for _ in range(50 if rank == slow_rank else 0):
            time.sleep(0.05)
            agreement.still_reading()
        own = Outcome(Kind.FAILED, text) if rank == slow_rank else GOOD
        told.append(agreement.conclude(own).text)
        messages.close()
    return told


@pytest.mark.full
@pytest.mark.parametrize("slow_rank", [0, 2])
def test_who_still_reads_is_waited_for(slow_rank: int) -> None:
    told = run_ranks(_slow, 3, slow_rank)
    assert told == [[f"rank {slow_rank} of 3: first", f"rank {slow_rank} of 3: second"]] * 3
