"""The API against those who do not know its rules: token, size, form, epochs, claims, fuzz."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from megascale.cluster.driver.server import make_token
from megascale.cluster.messages import BODY_BYTES
from megascale.errors import LaunchError
from tests.cluster.driver.fakes import Cluster, cluster
from tests.cluster.driver.test_runtime import quick


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A job that trains on two nodes and is not disturbed by silence."""
    chosen = quick(suspect_after_s=60.0, flap_tolerance_s=90.0)
    with cluster(tmp_path_factory.mktemp("run"), chosen) as one:
        one.run()
        one.until_trains()
        yield one


def join(node: str = "n0", incarnation: str = "x", **changes: Any) -> dict[str, Any]:
    facts = {"host": "h", "ip": "127.0.0.1", "num_cpus": 1, "memory_bytes": 1}
    return {
        "node": node,
        "incarnation": incarnation,
        "epoch": 0,
        "unix_ns": 1,
        "facts": facts,
        **changes,
    }


def beat(made: Cluster, node: str = "n0", **changes: Any) -> dict[str, Any]:
    return {
        "node": node,
        "incarnation": made.agents[node].incarnation,
        "epoch": made.agents[node].epoch,
        "sequence": 1,
        "unix_ns": 1,
        **changes,
    }


def rank(number: int, epoch: int) -> dict[str, Any]:
    return {"rank": number, "local_rank": 0, "pid": 1, "epoch": epoch, "state": "running"}


PATHS = [("GET", "/v1/status"), ("POST", "/v1/heartbeat"), ("GET", "/openapi.json"), ("GET", "/x")]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic abc", "Bearer"])
def test_nobody_is_heard_without_the_token(
    made: Cluster, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.request(method, made.url + path, headers=headers, trust_env=False)
    assert answer.status_code == 401
    assert "Bearer" in answer.json()["detail"]


def test_the_token_is_its_owners_alone_and_stays_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "driver" / "token"
    token = make_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 32
    assert make_token(path) == token
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="may be read by others"):
        make_token(path)


@pytest.mark.parametrize("path", ["/v1/heartbeat", "/v1/join", "/v1/results"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(made: Cluster, path: str, announced: bool) -> None:
    body = b'{"node": "' + b"x" * BODY_BYTES + b'"}'
    content: Any = body if announced else iter([body[: BODY_BYTES // 2], body[BODY_BYTES // 2 :]])
    answer = made.client.post(path, content=content)
    assert answer.status_code == 413
    assert str(BODY_BYTES) in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/heartbeat", b"{", []),
        ("/v1/heartbeat", b'{"node": "n0"}', ["incarnation"]),
        ("/v1/join", b"[]", ["body"]),
        ("/v1/join", b'{"node": "a b"}', ["body", "node"]),
        ("/v1/evict", b'{"node": "n0", "reason": "x", "sudo": 1}', ["body", "sudo"]),
        ("/v1/update", b'{"overrides": "a.b=1"}', ["body", "overrides"]),
    ],
)
def test_malformed_bodies_are_refused_with_where_and_why(
    made: Cluster, path: str, body: bytes, where: list[str]
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = made.client.post(path, content=body, headers=headers)
    assert answer.status_code == 422
    details = answer.json()["detail"]
    assert any(detail["loc"][: len(where)] == where and detail["msg"] for detail in details)
    assert made.status().refused["HTTP 422"] >= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e400])
def test_a_number_that_is_none_is_refused(made: Cluster, value: float) -> None:
    import json

    body = json.dumps(beat(made, ranks=[{**rank(0, 1), "uptime_s": value}]))
    answer = made.client.post("/v1/heartbeat", content=body)
    assert answer.status_code == 422


def test_an_incarnation_that_never_joined_is_told_to_join(made: Cluster) -> None:
    for stranger in (beat(made, incarnation="other"), beat(made) | {"node": "nobody"}):
        answer = made.client.post("/v1/heartbeat", json=stranger)
        assert answer.status_code == 200
        assert answer.json() == {"epoch": 1, "known": False, "leave": False}
    answer = made.client.get("/v1/commands", params={"node": "nobody", "incarnation": "x"})
    assert answer.status_code == 404


def test_ranks_of_another_node_are_refused(made: Cluster) -> None:
    stolen = made.client.post("/v1/heartbeat", json=beat(made, ranks=[rank(2, 1)]))
    assert stolen.status_code == 409
    assert "n0 claims rank 2" in stolen.json()["detail"]
    fresh = made.client.post("/v1/join", json=join("n9", ranks=[rank(0, 1)]))
    assert fresh.status_code == 409
    assert made.status().phase == "training"


def test_ranks_of_an_epoch_that_is_over_count_for_nothing(made: Cluster) -> None:
    dead = {**rank(2, 0), "state": "exited", "exit_code": -9}
    assert made.client.post("/v1/heartbeat", json=beat(made, ranks=[dead])).status_code == 200
    assert made.status().phase == "training"


def test_an_epoch_that_this_driver_never_made_is_refused(made: Cluster) -> None:
    assert made.client.post("/v1/heartbeat", json=beat(made, epoch=7)).status_code == 409
    far = made.client.post("/v1/join", json=join("n9", epoch=1 << 62))
    assert far.status_code == 409
    assert made.status().epoch == 1


def test_a_result_of_no_command_changes_nothing(made: Cluster) -> None:
    result = {key: value for key, value in beat(made).items() if key != "unix_ns"} | {"ok": False}
    answer = made.client.post("/v1/results", json=result)
    assert answer.status_code == 200
    assert made.status().phase == "training"


def test_evicting_nobody_says_who_there_is(made: Cluster) -> None:
    answer = made.client.post("/v1/evict", json={"node": "n77", "reason": "x"})
    assert answer.status_code == 404
    assert "n0 (active), n1 (active)" in answer.json()["detail"]


def test_evicting_a_node_that_left_is_refused_with_who_is_there(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(spares=1)) as made:
        made.run()
        made.until(lambda s: s.phase == "training" and any(n.state == "spare" for n in s.nodes))
        spare = next(node.node for node in made.status().nodes if node.state == "spare")
        request = {"node": spare, "reason": "maintenance"}
        assert made.client.post("/v1/evict", json=request).status_code == 200
        made.until(lambda s: any(n.node == spare and n.state == "evicted" for n in s.nodes))
        again = made.client.post("/v1/evict", json=request)
        assert again.status_code == 409
        assert again.json()["detail"].startswith(f"{spare} is evicted already; nodes that can be")
        assert f"{spare} (" not in again.json()["detail"]


def test_what_is_refused_is_told_once(made: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    made.started.driver.desk.refusals.__init__()  # type: ignore[misc]
    for _ in range(50):
        httpx.get(made.url + "/v1/status", trust_env=False)
    assert made.status().refused["HTTP 401"] == 50
    assert caplog.text.count("HTTP 401") == 1


def test_an_agent_that_was_replaced_is_told_to_go(tmp_path: Path) -> None:
    with cluster(tmp_path, quick(suspect_after_s=60.0, flap_tolerance_s=90.0)) as made:
        made.run()
        made.until_trains()
        old = made.agents["n0"]
        assert made.client.post("/v1/join", json=join("n0", "newer")).status_code == 200
        made.until(lambda _: old.left)
        again = made.client.post("/v1/join", json=join("n0", old.incarnation))
        assert again.status_code == 403


@pytest.mark.full
def test_fuzz_from_its_own_openapi(made: Cluster) -> None:
    """No 5xx, whatever fits or breaks the schema; the job trains on."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    headers = dict(made.client.headers)
    schema = schemathesis.openapi.from_url(made.url + "/openapi.json", headers=headers)
    for operation in schema.get_all_operations():
        called = operation.ok()
        if called.path in ("/v1/stop", "/v1/commands"):  # these do what they say: end it, and wait
            continue

        @given(case=called.as_strategy())
        @settings(
            max_examples=30,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def fuzz(case: Any) -> None:
            answer = case.call(base_url=made.url, headers=headers, timeout=10.0)
            assert answer.status_code < 500, (case.body, answer.text)

        fuzz()
    assert made.status().phase == "training"
