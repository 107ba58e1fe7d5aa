"""After the driver went back, ranks are told that memory holds what was given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cluster.actions import Place, StartEpoch
from megascale.cluster.driver.program import Program
from megascale.env import START
from tests.cluster.driver.jobs import ByHand, policy


@pytest.mark.parametrize(
    ("back", "newest_step", "told"),
    [(0, None, {}), (1, None, {"MEGASCALE_RESUME": "disk"}), (0, 7, {"MEGASCALE_RESUME": "disk"})],
)
def test_resume_from_disk(
    tmp_path: Path, back: int, newest_step: int | None, told: dict[str, str]
) -> None:
    hand = ByHand(policy(2))
    hand.train(5)
    places = tuple(Place(name, rank) for rank, name in hand.job.holders.items())
    action = StartEpoch(2, places, resume=True, back=back, newest_step=newest_step)
    orders = Program(tmp_path, ()).orders(action, hand.job, 29500)
    for _, order in orders:
        assert {k: v for k, v in order.environment.items() if k != START} == told
    again = Program(tmp_path, ()).orders(action, hand.job, 29500)
    starts = [{order.environment[START] for _, order in made} for made in (orders, again)]
    assert all(len(names) == 1 for names in starts), "one name for all ranks"
    assert starts[0] != starts[1], "and another one each time"
