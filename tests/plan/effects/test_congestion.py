"""The lossless switch and both laws by hand; then incast and all-to-all, law against law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.congestion import all_to_all, incast
from megascale.plan.effects.congestion_laws import (
    Dcqcn,
    DcqcnConstants,
    Feedback,
    Hybrid,
    HybridConstants,
)
from megascale.plan.effects.lossless_switch import Switches, SwitchSettings, in_proportion

SETTINGS = SwitchSettings()  # a step carries 50 kB
STEP = 50e3


def _switch(settings: SwitchSettings = SETTINGS) -> Switches:
    """Flows 0 -> 2, 1 -> 2 and 0 -> 3 of one switch of four ports."""
    return Switches(settings, np.array([0, 1, 0]), np.array([2, 2, 3]), 4, 1)


def _feedback(queue: float, mark_share: float = 0.0, acked: float = 4096.0) -> Feedback:
    one = np.ones(1)
    return Feedback(acked * one, queue * one, mark_share * one, np.array([mark_share > 0]))


# ------------------------------------------------------------ the switch


def test_an_output_is_shared_by_what_waits_and_nothing_is_lost() -> None:
    switch = _switch()
    left, queue = switch.step(np.array([60e3, 40e3, 10e3]))
    assert left.tolist() == pytest.approx([30e3, 20e3, 10e3])
    assert queue.tolist() == pytest.approx([100e3, 100e3, 10e3])
    later, _ = switch.step(np.zeros(3))
    assert (left + later).tolist() == pytest.approx([60e3, 40e3, 10e3])
    assert switch.waiting.sum() == pytest.approx(0.0, abs=1e-6)
    assert switch.most_queue.tolist() == [100e3]


def test_a_full_port_is_paused_and_blocks_what_goes_elsewhere() -> None:
    """An eighth of the free buffer of 800 kB; 300 kB came in at port 0, 50 kB left."""
    switch = _switch(replace(SETTINGS, buffer_bytes=800e3))
    assert switch.may_send().tolist() == [True] * 3
    switch.step(np.array([300e3, 0.0, 0.0]))
    assert switch.pauses.tolist() == [1]
    assert switch.may_send().tolist() == [False, True, False]  # flow 2 goes to an idle output
    for _ in range(5):
        switch.step(np.zeros(3))
    assert switch.may_send().tolist() == [True] * 3
    assert switch.pauses.tolist() == [1]
    assert switch.paused_s[0] == pytest.approx(4 * SETTINGS.step_s)  # 250, 200, 150, 100 kB wait


def test_switches_do_not_share_their_buffers() -> None:
    settings = replace(SETTINGS, buffer_bytes=800e3)
    both = Switches(settings, np.array([0, 4]), np.array([2, 6]), 4, 2)
    both.step(np.array([300e3, 60e3]))
    assert both.pauses.tolist() == [1, 0]


def test_marks_by_hand() -> None:
    """25 kB to 1 MB, 1 % at most between, all above."""
    shares = _switch().marked_share(np.array([25e3, 512.5e3, 1e6, 1.1e6]))
    assert shares.tolist() == pytest.approx([0.0, 0.005, 0.01, 1.0])


def test_a_senders_link_is_shared_in_proportion() -> None:
    sent = in_proportion(np.array([50e3, 50e3, 25e3]), np.array([0, 0, 1]), 2, STEP)
    assert sent.tolist() == pytest.approx([25e3, 25e3, 25e3])


# ------------------------------------------------------------ the laws


def test_dcqcn_by_hand() -> None:
    """Line rate 25 GB/s; the first mark halves it, the next within 50 us does nothing; then five
    recoveries in halves towards the rate before the cut, then 25 MB/s more each."""
    line = SETTINGS.bytes_per_s
    law = Dcqcn(1, SETTINGS, DcqcnConstants())
    nothing = np.zeros(1)
    law.hear(_feedback(2e6, 1.0), nothing, 0.0)
    assert law.rate[0] == pytest.approx(line / 2)
    law.hear(_feedback(2e6, 1.0), nothing, 10e-6)
    assert law.rate[0] == pytest.approx(line / 2)
    law.hear(_feedback(2e6, 1.0), nothing, 51e-6)
    assert law.rate[0] == pytest.approx(line / 4)  # alpha stays 1 while there are marks
    rate, target = line / 4, line / 2
    for number in range(1, 8):
        law.hear(_feedback(0.0), nothing, 51e-6 + number * 55.1e-6)
        target = target + (line / 1000 if number > 5 else 0.0)
        rate = (rate + target) / 2
        assert law.rate[0] == pytest.approx(rate)
    alpha = (1 - 1 / 256) ** 7
    law.hear(_feedback(2e6, 1.0), nothing, 51e-6 + 7 * 55.1e-6 + 1e-6)
    assert law.rate[0] == pytest.approx(rate * (1 - alpha / 2), rel=1e-6)


def test_dcqcn_recovers_by_bytes_too() -> None:
    law = Dcqcn(1, SETTINGS, DcqcnConstants())
    law.hear(_feedback(2e6, 1.0), np.zeros(1), 0.0)
    law.hear(_feedback(0.0), np.full(1, 10e6), 1e-6)
    assert law.rate[0] == pytest.approx(0.75 * SETTINGS.bytes_per_s)


def test_hybrid_by_hand() -> None:
    """Base 8 us, target 12 us more. A queue of 1 MB takes 40 us: the window is cut by
    0.8 x 28 / 48; not again in this round trip; without a queue it grows a packet a round trip."""
    law = Hybrid(1, SETTINGS, HybridConstants())
    window = SETTINGS.window_bytes
    assert window == pytest.approx(200e3)
    law.hear(_feedback(1e6), np.zeros(1), 0.0)
    assert law.window[0] == pytest.approx(window * (1 - 0.8 * 28 / 48))
    cut = law.window[0]
    law.hear(_feedback(1e6), np.zeros(1), 20e-6)
    assert law.window[0] == pytest.approx(cut)
    law.hear(_feedback(0.0, acked=cut), np.zeros(1), 40e-6)
    assert law.window[0] == pytest.approx(cut + 4096)


def test_hybrid_hears_marks_before_the_queue_is_late() -> None:
    """300 kB take 12 us: not above the target. A mark cuts by alpha / 2 at once, then not within
    a base round trip; alpha follows the share of marks."""
    law = Hybrid(1, SETTINGS, HybridConstants())
    law.hear(_feedback(299e3, 0.5, acked=200e3), np.zeros(1), 0.0)
    alpha = 1 + (0.5 - 1) / 16
    window = SETTINGS.window_bytes * (1 - alpha / 2)
    assert law.window[0] == pytest.approx(window + 4096 * 200e3 / window)
    before = law.window[0]
    law.hear(_feedback(299e3, 0.5, acked=1.0), np.zeros(1), 4e-6)
    assert law.window[0] >= before


def test_a_window_bounds_what_is_under_way() -> None:
    hybrid, dcqcn = Hybrid(1, SETTINGS, HybridConstants()), Dcqcn(1, SETTINGS, DcqcnConstants())
    assert hybrid.wanted(np.array([190e3])).tolist() == pytest.approx([10e3])
    assert hybrid.wanted(np.array([250e3])).tolist() == [0.0]
    assert dcqcn.wanted(np.array([250e3])).tolist() == pytest.approx([STEP])


# ------------------------------------------------------------ patterns


@pytest.mark.parametrize("senders", [8, 32, 64])
def test_incast_pauses_less_and_delivers_as_much_under_the_hybrid(senders: int) -> None:
    """The first three milliseconds of N senders to one."""
    old, new = (incast(senders, law, seconds=3e-3, num_draws=2) for law in ("dcqcn", "hybrid"))
    assert new.pauses.high == 0.0 <= old.pauses.low
    assert old.pauses.low > 100 or senders < 64
    assert new.goodput.low >= old.goodput.high
    assert new.goodput.value > 0.99
    assert new.queue_bytes.high < old.queue_bytes.low / 2
    assert new.victim_loss.high < 0.01
    if senders == 64:  # head-of-line blocking
        assert old.victim_loss.low > 0.05
        assert old.paused_share.low > 0.01


def test_all_to_all_under_both_laws() -> None:
    old, new = (all_to_all(16, law, num_draws=1) for law in ("dcqcn", "hybrid"))
    assert new.goodput.low > old.goodput.high > 0.2
    assert new.queue_bytes.high < old.queue_bytes.low
    assert new.goodput.high <= 1.0


def test_a_seed_repeats() -> None:
    one, again, other = (incast(4, "dcqcn", seed=s, seconds=2e-4) for s in (1, 1, 2))
    assert one == again != other


@pytest.mark.slow
@pytest.mark.parametrize("senders", [8, 32, 128])
def test_left_alone_both_laws_fill_the_link(senders: int) -> None:
    """Forty milliseconds: goodput comes together, pauses of many senders do not."""
    old, new = (incast(senders, law, seconds=40e-3, num_draws=1) for law in ("dcqcn", "hybrid"))
    assert new.goodput.value >= old.goodput.value > 0.85
    assert new.pauses.value <= old.pauses.value
    assert old.pauses.value > 0 or senders < 128


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="congestion control 'cubic'; legal: dcqcn, hybrid"):
        incast(8, "cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="senders is 0; legal is a whole number, 1 or more"):
        incast(0, "hybrid")
    with pytest.raises(ConfigError, match="hosts is 1; legal is 2 or more"):
        all_to_all(1, "hybrid")
    with pytest.raises(ConfigError, match="seconds is -1"):
        incast(8, "hybrid", seconds=-1.0)
    with pytest.raises(ConfigError, match="link_gbps is 0; legal is more than 0"):
        SwitchSettings(link_gbps=0.0)
    with pytest.raises(
        ConfigError, match=r"mark_from_bytes is 2e[+]06; legal is 0 or more, at most"
    ):
        SwitchSettings(mark_from_bytes=2e6)
