"""Days, GPU-hours and money of training on so many tokens, without faults and with them.

The time with faults is the time without divided by the expected ETTR (2410.21680; the planner's
`effects/failures.py`). What it rests on is printed with it: a failure rate that somebody published,
and the recovery that MegaScale published (6.3), as long as this cluster has no figures of its own.
"""

from __future__ import annotations

import math

from megascale.errors import ConfigError
from megascale.plan.effects.failures import FAILURES_PER_NODE_DAY, RECOVERY, expected_ettr
from megascale.plan.search.result import Training

DAY_S = 86400.0
RATE = "llama3"
_DEVICES_OF_A_RATE = 8  # failure rates are of nodes of eight
_STALL_S = 5.0  # of a checkpoint: what the copy to host memory takes


def check_tokens(tokens: float | None) -> None:
    """Raises ConfigError for what is no number of tokens."""
    if tokens is not None and not (math.isfinite(tokens) and tokens > 0):
        raise ConfigError(
            f"--tokens {tokens:g}: tokens to train on are a number above 0, such as 300e9"
        )


def training_cost(
    tokens: float, tokens_per_s: float, num_devices: int, price_per_gpu_hour: float | None
) -> Training:
    """See the module."""
    seconds = tokens / tokens_per_s
    days = seconds / DAY_S
    num_nodes = max(1, round(num_devices / _DEVICES_OF_A_RATE))
    recovery_s = RECOVERY["paper"].total_s
    found = {
        name: expected_ettr(num_nodes, rate, recovery_s, _STALL_S, days=days)
        for name, rate in FAILURES_PER_NODE_DAY.items()
    }
    usual = found[RATE]
    return Training(
        tokens=tokens,
        tokens_per_s=tokens_per_s,
        days=days,
        gpu_hours=num_devices * seconds / 3600.0,
        price_per_gpu_hour=price_per_gpu_hour,
        ettr=usual.value,
        ettr_low=usual.low,
        ettr_high=usual.high,
        ettr_of={name: one.value for name, one in found.items()},
        assumptions=(
            (
                f"{FAILURES_PER_NODE_DAY[RATE]:.4f} failures a node-day of eight GPUs (Llama 3, "
                f"2407.21783): one in {_duration(usual.mtbf_s)} here"
            ),
            (
                f"recovery {_duration(recovery_s)} (MegaScale 6.3), a checkpoint that stalls "
                f"{_STALL_S:.0f} s every {_duration(usual.interval_s)} (Young)"
            ),
        ),
    )


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "forever"
    for size, unit in ((DAY_S, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
