"""Every endpoint, with good and bad input, over real runs and no browser."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.telemetry.faults import Restart, SlowRank
from megascale.errors import DataError, LaunchError
from megascale.events import Incident, to_line
from megascale.telemetry.dashboard.server import Server, read_token
from megascale.telemetry.dashboard.source import find_source
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Answer, Reader, Window
from megascale.telemetry.store.run import Run
from tests.telemetry.dashboard.served import TOKEN, ask, dashboard, make_run, opened
from tests.telemetry.dashboard.waiting import until

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = make_run(tmp_path_factory.mktemp("run") / "slow", SlowRank(5, 0.2), Restart(30, 20))
    with dashboard(run) as serving:
        opened(serving)
        yield serving


def test_the_page_and_all_that_it_names_is_there(server: Server) -> None:
    page = ask(server, "/")
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    names = [part.split('"')[0] for part in text.split('="/page/')[1:]]
    assert len(names) > 8
    for name in names:
        assert ask(server, f"/page/{name}").status == 200, name
    assert "http" not in text.replace("http-equiv", ""), "the page asks nobody else"
    assert ask(server, "/favicon.ico").headers["content-type"] == "image/svg+xml"


def test_a_file_that_is_known_is_not_sent_again(server: Server) -> None:
    first = ask(server, "/page/main.js", headers={"Accept-Encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    again = ask(server, "/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/page/../server.py", "/page/%2e%2e/server.py", "/page/..%2f..%2fenv.py", "/etc/passwd", "/x"],
)
def test_nothing_else_is_served(server: Server, path: str) -> None:
    assert ask(server, path).status == 404


def test_the_overview(server: Server) -> None:
    seen = ask(server, "/api/overview").json()
    assert seen["newest_step"] == 40
    assert seen["mesh"] == {"tensor": 2, "data": 4, "pipeline": 2}
    assert [start["steps"] for start in seen["starts"]] == [[1, 30], [21, 40]]
    assert seen["newest"]["loss"] > 0
    assert seen["may_write"] is False
    assert seen["driver"] == {"status": None, "why": "this run has no driver"}
    assert "resources" not in {one["name"] for one in seen["incidents"]}


def test_every_reader_answers_or_says_why_not(server: Server) -> None:
    listed = ask(server, "/api/readers").json()
    assert [one["name"] for one in listed] == list(READERS)
    for one in listed:
        reply = ask(server, f"/api/read/{one['name']}")
        assert reply.status == 200, (one["name"], reply.body[:300])
        assert reply.json()["level"] in ("ok", "notice", "alert", "none")
        assert reply.json()["question"] == one["question"]
        assert reply.json()["summary"]


@pytest.mark.parametrize(
    ("query", "told"), [("first=9999", "steps 9999"), ("ranks=900", "ranks [900] were asked for")]
)
def test_what_cannot_be_asked_of_this_run_is_said(server: Server, query: str, told: str) -> None:
    answer = ask(server, f"/api/read/heat_map?{query}").json()
    assert answer["level"] == "none"
    assert told in answer["summary"]


def test_the_slow_rank_is_in_the_heat_map(server: Server) -> None:
    data = ask(server, "/api/read/heat_map").json()["data"]
    slow = [one for one in data["outliers"] if one["dimension"] == "rank" and not one["waits"]]
    assert {one["value"] for one in slow} == {"5"}


def test_a_window_reaches_the_reader(server: Server) -> None:
    data = ask(server, "/api/read/heat_map?first=31&last=35&ranks=0-3").json()["data"]
    assert (data["first_step"], data["last_step"], data["ranks"]) == (31, 35, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/api/read/nonsense", 404, "there are summary, heat_map"),
        ("/api/read/heat_map?first=5&last=2", 422, "first comes before last"),
        ("/api/read/heat_map?first=abc", 422, "whole number"),
        ("/api/read/heat_map?ranks=..%2F..", 422, "write ranks as in"),
        ("/api/spans?first=x", 422, "whole number"),
        ("/api/spans?ranks=0-9999", 422, "ask for 512 at most"),
        ("/api/log?rank=..%2F..%2Fetc%2Fpasswd", 422, "integer"),
        ("/api/log?rank=-1", 422, "greater than or equal to 0"),
        ("/api/metrics?after=-5", 422, "greater than or equal to 0"),
        (f"/api/read/heat_map?ranks={'1,' * 20_000}1", 414, "ask for fewer ranks"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    server: Server, path: str, status: int, told: str
) -> None:
    reply = ask(server, path)
    assert reply.status == status
    assert told in reply.json()["detail"]


def test_spans_of_the_newest_sampled_step_and_of_a_window(server: Server) -> None:
    newest = ask(server, "/api/spans?ranks=4-5").json()
    assert newest["first"] == newest["last"] == newest["sampled"][-1] == 40
    assert set(newest["rank"]) == {4, 5}
    assert "forward" in newest["strings"]
    both = ask(server, "/api/spans?first=30&last=40&ranks=5").json()
    assert set(both["step"]) == {30, 40}
    assert len({len(both[name]) for name in ("rank", "t0_us", "dur_us", "name", "seq")}) == 1
    assert ask(server, "/api/spans?first=31&last=32&ranks=5").json()["rank"] == []


def test_places_and_metrics(server: Server) -> None:
    places = ask(server, "/api/places").json()
    assert places["rank"] == list(range(16))
    assert [places["hosts"][host] for host in places["host"]][::8] == ["node-0000", "node-0001"]
    metrics = ask(server, "/api/metrics").json()
    assert metrics["starts"] == 2
    assert metrics["columns"]["step"][:30] == list(range(1, 31))
    assert metrics["columns"]["current"].count(False) == 10  # steps 21 to 30, done again
    assert ask(server, f"/api/metrics?after={metrics['next']}").json()["columns"]["step"] == []


def test_log_and_first_errors(server: Server) -> None:
    tail = ask(server, "/api/log?rank=0").json()
    assert tail["text"].splitlines()[-1] == "step: 2  loss: 6.1"
    assert ask(server, f"/api/log?rank=0&after={tail['next']}").json()["text"] == ""
    assert ask(server, "/api/log").json() == {"errors": [], "num_errors": 0, "ranks": [0]}


def test_it_is_read_only_without_a_token(server: Server) -> None:
    for path in ("/api/evict", "/api/requests", "/api/token"):
        reply = ask(server, path, method="POST", body={})
        assert reply.status == 403
        assert "read-only" in reply.json()["detail"]
    assert ask(server, "/api/overview", method="DELETE").status == 403


def test_another_name_for_this_address_is_refused(server: Server) -> None:
    reply = ask(server, "/api/overview", headers={"Host": "rebound.example"})
    assert reply.status == 421


def test_a_reader_that_breaks_is_told_and_the_rest_lives(tmp_path: Path) -> None:
    def breaks(_run: Run, _window: Window) -> Answer:
        raise RuntimeError("a defect")

    def nan(_run: Run, _window: Window) -> Answer:
        return Answer("ok", "said", {"x": float("nan")})

    readers = {name: Reader(name, "?", one) for name, one in (("breaks", breaks), ("nan", nan))}
    with dashboard(make_run(tmp_path / "run"), readers=readers) as serving:
        opened(serving)
        reply = ask(serving, "/api/read/breaks")
        assert (reply.status, reply.json()["detail"]) == (500, "RuntimeError: a defect")
        assert ask(serving, "/api/read/nan").status == 500
        assert ask(serving, "/api/places").status == 200


def _events(server: Server, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    connection.request("GET", "/api/events")
    reply = connection.getresponse()
    assert reply.getheader("content-type") == "text/event-stream; charset=utf-8"
    return reply


def _next(reply: http.client.HTTPResponse, kind: str) -> dict[str, Any]:
    while True:
        line = reply.readline().decode()
        assert line, "the stream ended"
        if line == f"event: {kind}\n":
            found: dict[str, Any] = json.loads(reply.readline().decode().removeprefix("data: "))
            return found


def test_a_run_that_appears_later_and_grows_is_told_by_events(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with dashboard(folder) as serving:
        until(lambda: "no folder" in ask(serving, "/api/overview").json()["why"], "why")
        assert ask(serving, "/api/read/summary").status == 503
        connection = http.client.HTTPConnection(serving.host, serving.port, timeout=20)
        reply = _events(serving, connection)
        assert "there is no folder" in _next(reply, "state")["why"]
        make_run(folder)
        state = _next(reply, "state")
        while state["step"] != 40:
            state = _next(reply, "state")
        line = to_line(Incident(rank=3, name="nonfinite", t_ns=10**9, detail={"parameter": "w"}))
        with (folder / "telemetry" / "rank_00003.jsonl").open("a") as file:
            file.write(line)
        heard = _next(reply, "incident")
        assert [(one["rank"], one["name"]) for one in heard["incidents"]] == [(3, "nonfinite")]
        assert ask(serving, "/api/overview").json()["incidents"][-1]["detail"] == "parameter w"
        connection.close()
        until(lambda: serving.state.hub.num_clients == 0, "the client is forgotten")


def test_a_checkpoint_of_all_ranks_is_one_and_an_error_is_its_rank_s(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=12)
    for rank in range(4):
        path = run / "telemetry" / f"rank_{rank:05d}.jsonl"
        t_ns = json.loads(path.read_text().splitlines()[-1])["t_ns"] + rank
        lines = [
            to_line(Incident(rank=rank, name="checkpoint", t_ns=t_ns, step=s, detail={"path": "p"}))
            for s in (10, 12)
        ]
        lines += [to_line(Incident(rank=2, name="error", t_ns=t_ns, detail={"message": "ECC"}))] * (
            rank == 2
        )
        with path.open("a") as file:
            file.writelines(lines)
    with dashboard(run) as serving:
        seen = opened(serving)
        assert [one["step"] for one in seen["checkpoints"]] == [10, 12]
        assert [(one["rank"], one["name"]) for one in seen["incidents"]] == [(2, "error")]
        assert ask(serving, "/api/places").json()["errors"] == {"2": "error: message ECC"}


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with dashboard(tmp_path) as serving:
        why = until(lambda: ask(serving, "/api/overview").json()["why"], "why")
        until(lambda: "no folder telemetry" in ask(serving, "/api/overview").json()["why"], why)
        assert ask(serving, "/api/metrics").json()["columns"]["step"] == []
        assert ask(serving, "/api/spans").status == 503
        assert ask(serving, "/").status == 200


def test_the_server_ends_while_a_browser_listens(tmp_path: Path) -> None:
    with dashboard(tmp_path) as serving:
        connection = http.client.HTTPConnection(serving.host, serving.port, timeout=20)
        reply = _events(serving, connection)
        _next(reply, "driver") if serving.state.driver()["status"] else reply.readline()
    assert reply.read() is not None  # the stream was ended, not left
    connection.close()


def test_what_is_no_run_and_no_driver_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DataError, match="is a file"):
        find_source(str(file), None)
    with pytest.raises(DataError, match="nor the folder"):
        find_source(str(tmp_path / "a" / "b"), None)
    with pytest.raises(LaunchError, match="give the file with --token-file"):
        find_source("http://127.0.0.1:1", None)


def test_a_port_in_use_is_refused(server: Server) -> None:
    with pytest.raises(LaunchError, match=f"port {server.port}"):
        Server(server.state, port=server.port)


@pytest.mark.parametrize("text", ["", "short", "two words that are long", "ünïcode-is-no-token-x"])
def test_what_is_no_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(DataError):
        read_token(tmp_path / "token")
    with pytest.raises(DataError, match="cannot be read"):
        read_token(tmp_path / "none")
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_token(tmp_path / "token") == TOKEN
