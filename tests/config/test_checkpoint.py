"""`[checkpoint]`: tiers that cannot work together are refused before anything starts."""

from __future__ import annotations

import pytest

from megascale.config import load_config
from megascale.errors import ConfigError

REMOTE = 'checkpoint.remote="s3://bucket/run"'
REFUSED = [
    (["checkpoint.remote_interval=4"], "remote_interval is 4 without checkpoint.remote; name"),
    (["checkpoint.remote_interval_minutes=2.5"], "minutes is 2.5 without checkpoint.remote"),
    (
        [REMOTE, "checkpoint.remote_interval=6", "checkpoint.interval=4"],
        "remote_interval 6 is not a multiple of checkpoint.interval 4.*nearest legal: 4 or 8",
    ),
    (
        [REMOTE, "checkpoint.remote_interval=3", "checkpoint.interval=4"],
        "remote_interval 3 is not a multiple of checkpoint.interval 4.*nearest legal: 4$",
    ),
    (
        [REMOTE, "checkpoint.remote_interval=3", "checkpoint.interval_minutes=5.0"],
        "remote_interval is 3 without checkpoint.interval.*set checkpoint.interval to 3",
    ),
    (
        [REMOTE, "checkpoint.remote_interval_minutes=60.0"],
        "remote_interval_minutes is 60, but checkpoints are saved only at the end",
    ),
    (
        [REMOTE, "checkpoint.remote_interval_minutes=5.0", "checkpoint.interval_minutes=15.0"],
        "5 is shorter than checkpoint.interval_minutes 15.*nearest legal: 15",
    ),
    ([REMOTE, "checkpoint.save_at_end=false"], "nothing is saved that could be copied"),
    (['checkpoint.remote=" s3://bucket"'], "with spaces around it; legal: 's3://bucket'"),
    (["checkpoint.async_mode=async"], "'background' or 'off'"),
    (["checkpoint.interval_minutes=-1.0"], "greater than or equal to 0"),
    (["checkpoint.remote_keep_latest_k=0"], "greater than or equal to 1"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_tiers_that_contradict_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?sm){message}"):
        load_config(None, overrides)


LEGAL = [
    [REMOTE],
    [REMOTE, "checkpoint.interval=4", "checkpoint.remote_interval=12"],
    [REMOTE, "checkpoint.interval=4", "checkpoint.remote_interval_minutes=0.5"],
    [
        *(REMOTE, "checkpoint.interval=4", "checkpoint.interval_minutes=30.0"),
        *("checkpoint.remote_interval=8", "checkpoint.remote_interval_minutes=30.0"),
    ],
]


@pytest.mark.parametrize("overrides", LEGAL, ids=lambda v: str(len(v)))
def test_tiers_that_agree_are_taken(overrides: list[str]) -> None:
    assert load_config(None, overrides).checkpoint.remote == "s3://bucket/run"


def test_only_what_is_saved_during_training_is_written_behind_it() -> None:
    def is_behind(*overrides: str) -> bool:
        return load_config(None, [f"checkpoint.{one}" for one in overrides]).checkpoint.is_behind

    assert is_behind("interval=2")
    assert is_behind("interval_minutes=2.0")
    assert not is_behind()
    assert not is_behind("interval=2", 'async_mode="off"')
    assert not is_behind("interval=2", "enable=false")
