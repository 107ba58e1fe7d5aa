"""What the tests on GPUs look at after a call is all that a call may leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.flux.arena import NUM_SLOTS, Slot, zeros_of
from tests.flux.gpu_cases import not_at_rest


class _Arena:
    """A rank's words."""

    rank = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.one = torch.ones(1, dtype=torch.int32)
        self.done = torch.zeros(64, dtype=torch.int32)
        self.report = torch.zeros(8, dtype=torch.int64)
        self._slots = [
            Slot(
                0, [torch.zeros(8)] * 2, torch.zeros(2, 16, dtype=torch.int32).unbind(), self.device
            )
            for _ in range(NUM_SLOTS)
        ]


@pytest.mark.parametrize("where", ["flag", "done", "tickets", "chunks", "report"])
def test_what_a_call_has_left_is_seen(where: str) -> None:
    arena: Any = _Arena()
    of_forms = {what: zeros_of(arena, what, 16) for what in ("tickets", "chunks")}
    places = {**of_forms, "done": arena.done, "report": arena.report}
    places["flag"] = arena._slots[2].flags[0]
    assert not_at_rest(arena) == ""
    places[where][0] = 1
    assert where in not_at_rest(arena)


def test_a_flag_of_a_peer_is_the_peers_affair() -> None:
    arena: Any = _Arena()
    arena._slots[0].flags[1][3] = 1
    assert not_at_rest(arena) == ""
