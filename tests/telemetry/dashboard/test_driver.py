"""A run with a driver: its status on the page, a node out of the job, and a driver that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.errors import DataError, LaunchError
from megascale.telemetry.dashboard.server import Server, serve
from megascale.telemetry.dashboard.source import find_source
from tests.telemetry.dashboard.served import TOKEN, FakeDriver, ask, dashboard, make_run
from tests.telemetry.dashboard.waiting import until

pytestmark = pytest.mark.full
PRESENTED = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
EVICT = {"node": "n1", "reason": "it is slow"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("driven") / "run", num_steps=12)


def test_a_folder_leads_to_its_driver_and_a_driver_to_its_folder(run: Path) -> None:
    with FakeDriver(run) as driver:
        token_file = driver.beside(run)
        for given, file in ((run, None), (driver.url, token_file)):
            with dashboard(given, token_file=file) as serving:
                seen = until(lambda: ask(serving, "/api/driver").json()["status"], "its status")
                assert seen["ettr"] == 0.8
                assert ask(serving, "/api/overview").json()["run_dir"] == str(run)


def test_the_drivers_token_by_the_environment(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def waited(server: Server) -> None:
        """In place of waiting for Ctrl-C."""
        until(lambda: ask(server, "/api/driver").json()["status"], "its status")
        reply = ask(server, "/api/evict", method="POST", body=EVICT, headers=PRESENTED)
        said.append(str(reply.status))

    monkeypatch.setattr(Server, "wait", waited)
    of = {"host": "127.0.0.1", "port": 0, "token_file": None, "open_browser": False}
    with FakeDriver(run) as driver:
        with pytest.raises(LaunchError, match=r"or in MEGASCALE_TOKEN_FILE"):
            serve(driver.url, **of, say=said.append)  # type: ignore[arg-type]
        monkeypatch.setenv("MEGASCALE_TOKEN_FILE", str(driver.beside(run)))
        serve(driver.url, **of, say=said.append)  # type: ignore[arg-type]
        assert said[-1] == "202"
        assert driver.evicted == [EVICT | {"block": True}]


def test_a_driver_that_goes_is_told_and_the_next_one_found(run: Path) -> None:
    with FakeDriver(run) as first:
        first.beside(run)
        with dashboard(run) as serving:
            until(lambda: ask(serving, "/api/driver").json()["status"], "the first")
            first.__exit__()
            gone = until(lambda: ask(serving, "/api/driver").json()["why"], "it is gone")
            assert "does not answer" in gone
            assert ask(serving, "/api/driver").json()["status"]["phase"] == "training"  # the last
            with FakeDriver(run) as second:
                second.status["phase"] = "stopping"
                second.beside(run)
                until(
                    lambda: ask(serving, "/api/driver").json()["status"]["phase"] == "stopping",
                    "the second",
                )


def test_with_the_token_a_node_is_evicted(run: Path) -> None:
    with FakeDriver(run) as driver:
        driver.beside(run)
        with dashboard(run, token=TOKEN) as serving:
            until(lambda: ask(serving, "/api/driver").json()["status"], "its status")
            wrong = PRESENTED | {"Authorization": "Bearer wrong"}
            reply = ask(serving, "/api/evict", method="POST", body=EVICT, headers=wrong)
            assert reply.status == 401
            assert driver.evicted == []
            reply = ask(serving, "/api/evict", method="POST", body=EVICT, headers=PRESENTED)
            assert (reply.status, reply.json()["epoch"]) == (202, 2)
            assert driver.evicted == [EVICT | {"block": True}]
            driver.refuses = 409, "n1 is gone already"
            reply = ask(serving, "/api/evict", method="POST", body=EVICT, headers=PRESENTED)
            assert (reply.status, reply.json()["detail"]) == (
                409,
                "the driver says: n1 is gone already",
            )


@pytest.mark.parametrize(
    "body", [{}, {"node": "", "reason": "x"}, {"node": "n", "reason": "x", "also": 1}, [1], "text"]
)
def test_an_eviction_that_is_none_is_refused(run: Path, body: object) -> None:
    with dashboard(run, token=TOKEN) as serving:
        reply = ask(serving, "/api/evict", method="POST", body=body, headers=PRESENTED)
        assert reply.status == 422
        assert reply.json()["detail"]


def test_without_a_driver_nothing_can_be_evicted(tmp_path: Path) -> None:
    with dashboard(tmp_path, token=TOKEN) as serving:
        reply = ask(serving, "/api/evict", method="POST", body=EVICT, headers=PRESENTED)
        assert reply.status == 422
        assert "has no driver" in reply.json()["detail"]
        assert ask(serving, "/api/token", method="POST", body={}, headers=PRESENTED).json() == {
            "ok": True
        }


def test_a_driver_with_another_token_or_a_folder_elsewhere_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with FakeDriver(tmp_path / "nowhere") as driver:
        token.write_text("another-token-of-16+")
        with pytest.raises(LaunchError, match="the driver says: this needs the driver's token"):
            find_source(driver.url, token)
        token.write_text(TOKEN)
        with pytest.raises(DataError, match="cannot see"):
            find_source(driver.url, token)
    with pytest.raises(LaunchError, match="does not answer"):
        find_source(driver.url, token)
