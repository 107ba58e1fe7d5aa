"""Why a rank ended, and who was first."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megascale.cluster.agent.failures import Recorded, explain, first_failed, of_record
from megascale.cluster.agent.log_reader import Match
from megascale.cluster.agent.log_rules import BY_NAME
from megascale.cluster.agent.run_files import last_line
from megascale.cluster.messages import Failure

S = 1_000_000_000
END_NS = 1_000 * S


def _match(rule: str, before_s: float, line: str = "said") -> Match:
    return Match(BY_NAME[rule], line, END_NS - int(before_s * S))


def _explain(exit_code: int | None, **known: object) -> Failure | None:
    defaults: dict[str, object] = {
        "asked": False,
        "recorded": None,
        "out_of_memory": False,
        "matches": [],
        "ended_ns": END_NS,
    }
    return explain(exit_code, **{**defaults, **known})  # type: ignore[arg-type]


def test_a_good_end_and_one_that_was_asked_for_are_no_failures() -> None:
    assert _explain(0) is None
    assert _explain(0, matches=[_match("connection", 1)]) is None
    assert _explain(-signal.SIGTERM, asked=True) is None
    assert _explain(-signal.SIGKILL, asked=True, out_of_memory=True) is None


@pytest.mark.parametrize(
    ("message", "exit_code", "kind", "rule"),
    [
        ("ValueError: 3", 1, "exception", None),
        ("the gradient of x is not finite", 6, "numerical", None),
        ("port 29500 cannot be used", 5, "launch", None),
        ("rank 1 failed: [gloo/transport/tcp/pair.cc:534] Connection closed", 5, "network", "gloo"),
        ("OSError: [Errno 28] No space left on device", 4, "disk_full", "disk_full"),
        ("OutOfMemoryError: CUDA out of memory. ", 1, "out_of_memory", "cuda_out_of_memory"),
    ],
)  # fmt: skip
def test_what_the_rank_recorded_comes_first(
    message: str, exit_code: int, kind: str, rule: str | None
) -> None:
    recorded = Recorded(END_NS - S, message, exit_code)
    failure = _explain(exit_code, recorded=recorded, matches=[_match("xid", 2)])
    assert failure == of_record(recorded, exit_code)
    assert failure is not None
    assert (failure.kind, failure.rule, failure.unix_ns) == (kind, rule, END_NS - S)
    assert failure.message == message


def test_it_counts_also_where_the_rank_was_asked_to_end() -> None:
    recorded = Recorded(END_NS - S, "ValueError: 3", 1)
    assert _explain(1, asked=True, recorded=recorded) is not None


def test_the_kernel_ends_by_kill_only() -> None:
    killed = _explain(-signal.SIGKILL, out_of_memory=True)
    assert killed is not None
    assert (killed.kind, killed.signal, killed.exit_code) == ("out_of_memory", "SIGKILL", -9)
    other = _explain(1, out_of_memory=True)
    assert other is not None
    assert other.kind == "exit"


def test_the_log_speaks_if_it_spoke_lately_and_of_itself_before_of_peers() -> None:
    said = [_match("disk_full", 300), _match("connection", 4, "reset"), _match("crash", 1, "segv")]
    failure = _explain(-signal.SIGSEGV, matches=said)
    assert failure is not None
    assert (failure.rule, failure.kind, failure.message) == ("crash", "signal", "segv")
    failure = _explain(1, matches=said[:2])
    assert failure is not None
    assert (failure.rule, failure.message, failure.unix_ns) == (
        "connection",
        "reset",
        END_NS - 4 * S,
    )


def test_one_that_is_killed_has_no_words_of_its_own() -> None:
    failure = _explain(-signal.SIGKILL, matches=[_match("connection", 1)])
    assert failure is not None
    assert (failure.kind, failure.message) == ("signal", "ended by SIGKILL without a word")
    failure = _explain(7)
    assert failure is not None
    assert (failure.kind, failure.message) == ("exit", "exited 7 without a word")


def test_one_that_exits_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    before = b"error: of an epoch before\n"
    own = b"[agent] rank 0 starts in epoch 2\nerror: no prepared data in x; make it\n\n"
    log.write_bytes(before + own)
    said = last_line(log, len(before))
    failure = _explain(3, last_words=said)
    assert failure is not None
    assert failure.message == "exited 3, its log ends: error: no prepared data in x; make it"
    assert last_line(log, len(before + own)) == ""
    assert last_line(tmp_path / "none", 0) == ""
    killed = _explain(-signal.SIGKILL, last_words=said)
    assert killed is not None
    assert killed.message == "ended by SIGKILL without a word"


def test_a_cut_error_file_is_none() -> None:
    whole = json.dumps({"time_ns": 3, "message": "m", "exit_code": 4})
    assert Recorded.parse(whole) == Recorded(3, "m", 4)
    assert not any(Recorded.parse(whole[:n]) for n in range(len(whole)))


def _failure(kind: str, at_s: float) -> Failure:
    return Failure(kind=kind, message="", unix_ns=int(at_s * S))


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({}, None),
        ({3: ("exception", 10.0), 1: ("exception", 11.0)}, 3),
        # peers of a rank that is killed see it go before the agent does
        ({0: ("network", 10.0), 1: ("network", 10.01), 2: ("signal", 10.05)}, 2),
        ({0: ("network", 10.0), 1: ("exception", 16.0)}, 0),
        ({4: ("network", 10.0), 2: ("network", 10.0)}, 2),
    ],
)
def test_the_first(failures: dict[int, tuple[str, float]], first: int | None) -> None:
    assert first_failed({rank: _failure(*told) for rank, told in failures.items()}) == first
