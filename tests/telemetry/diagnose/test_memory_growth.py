"""Memory that grows for ever is told from memory that is being taken, and from a single jump."""

from __future__ import annotations

import numpy as np

from megascale.telemetry.diagnose.memory_growth import growing_memory

GB = 10**9
STEPS = range(100, 2100, 100)


def _looks(sizes: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[tuple[int, int]]:
    return [(step, int(size)) for step, size in zip(STEPS, sizes, strict=True)]


def test_who_grows_is_named_with_its_rate_and_when_it_is_full() -> None:
    random = np.random.default_rng(0)
    for seed in range(20):
        leaking = seed % 8
        seen = {}
        for rank in range(8):
            sizes = np.full(20, 60.0 * GB)
            sizes[:3] = 40 * GB, 55 * GB, 59 * GB  # the first steps take what all others use
            sizes[8:] += 0.1 * GB * (rank == 3)  # a validation needs a little more, once
            if rank == leaking:
                sizes += np.cumsum(random.uniform(0.5, 1.5, 20)) * GB
            seen[rank] = _looks(np.maximum.accumulate(sizes))
        (found,) = growing_memory(seen, dict.fromkeys(range(8), 150.0 * GB))
        assert found.rank == leaking
        assert 0.006 * GB < found.bytes_a_step < 0.014 * GB  # 1 GB in 100 steps
        assert found.full_at_step is not None
        left = 150 * GB - found.now_bytes
        assert found.full_at_step == int(2000 + left / found.bytes_a_step)


def test_nobody_grows_who_has_settled_or_was_seen_too_seldom() -> None:
    settled = np.array([10.0, 40, 50, 55, 58, *[60] * 15]) * GB
    jumped = np.array([60.0] * 14 + [70] * 6) * GB
    assert growing_memory({0: _looks(settled), 1: _looks(jumped)}) == []
    assert growing_memory({0: [(step, step * GB) for step in range(5)]}) == []
    assert growing_memory({}) == []
