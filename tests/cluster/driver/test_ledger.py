"""The ledger sums to the wall clock, and a step counts as useful once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.cluster.ledger import KINDS, Ledger
from megascale.cluster.transitions import RankExited, StepReached
from tests.cluster.driver.jobs import ByHand
from tests.cluster.driver.test_ladder import training


def total_ns(ledger: Ledger) -> int:
    return sum(getattr(ledger, f"{kind}_ns") for kind in KINDS)


times = st.floats(0.0, 1e6, allow_nan=False)
bookings = st.one_of(
    st.tuples(times, st.sampled_from(KINDS)),
    st.tuples(times, st.integers(0, 9), st.integers(0, 9), st.floats(0.0, 1e3)),
)


@given(times, st.lists(bookings, max_size=40))
def test_kinds_sum_to_the_booked_time(start_s: float, entries: list[tuple[object, ...]]) -> None:
    ledger = Ledger(round(start_s * 1e9), round(start_s * 1e9))
    for entry in entries:
        if len(entry) == 2:
            ledger = ledger.book(*entry)  # type: ignore[arg-type]
        else:
            now_s, new, replayed, saved_s = entry
            ledger = ledger.book_steps(now_s, new=new, replayed=replayed, saved_s=saved_s)  # type: ignore[arg-type]
        assert total_ns(ledger) == ledger.wall_ns
        assert ledger.wall_ns >= 0


def test_steps_that_cross_the_highest_one_are_split() -> None:
    ledger = Ledger().book_steps(10.0, new=3, replayed=1, saved_s=2.0)
    assert (ledger.useful_ns, ledger.replay_ns, ledger.checkpoint_ns) == (6e9, 2e9, 2e9)


def ledger_s(hand: ByHand) -> dict[str, float]:
    return {kind: seconds for kind, seconds in hand.job.ledger.seconds().items() if seconds}


def test_a_fault_costs_detection_diagnosis_restart_and_replay() -> None:
    hand = training(step=5)
    before = ledger_s(hand)
    hand.go(StepReached(1, 10), after_s=50.0)
    hand.go(RankExited(2, -9, 1, "signal", signal="SIGKILL"), after_s=2.0)
    hand.stopped()  # two nodes, a second each
    hand.checked()  # one node, a second
    hand.steps(9)  # first step after a second, steps 9 (of an epoch before) another
    hand.go(StepReached(2, 12), after_s=30.0)  # 10 is old, 11 and 12 are new
    spent = {kind: after - before.get(kind, 0.0) for kind, after in ledger_s(hand).items()}
    assert {kind: round(seconds, 6) for kind, seconds in spent.items() if seconds} == {
        "useful": 50.0 + 20.0,
        "detection": 2.0,
        "restart": 2.0 + 1.0,
        "diagnosis": 1.0,
        "replay": 1.0 + 10.0,
    }
    assert total_ns(hand.job.ledger) == round(hand.now_s * 1e9)
