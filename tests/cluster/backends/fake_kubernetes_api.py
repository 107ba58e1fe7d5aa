"""The paths of the API that the backend uses, over a `FakeCluster`; on a port of the loopback."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.cluster.backends.fake_kubernetes import TICK_S, FakeCluster, Object
from tests.cluster.backends.harness import Harness

JOBSETS = "apis/jobset.x-k8s.io/v1alpha2"


@contextmanager
def serving(cluster: FakeCluster) -> Iterator[str]:
    """The URL of the API server; scheduler and kubelets run meanwhile."""
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    ending = threading.Event()

    def run() -> None:
        while not ending.wait(TICK_S):
            cluster.tick()

    threads = [threading.Thread(target=server.serve_forever), threading.Thread(target=run)]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        ending.set()
        server.shutdown()
        for thread in threads:
            thread.join()
        server.server_close()
        cluster.end()


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeCluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Not to the tests' output."""

    def do_GET(self) -> None:
        self._do(self._get)

    def do_POST(self) -> None:
        self._do(self._post)

    def do_DELETE(self) -> None:
        self._do(self._delete)

    def do_PATCH(self) -> None:
        self._do(self._patch)

    def _do(self, method: Callable[[str, str, dict[str, str]], None]) -> None:
        kind, name, query = self._target()
        call = f"{self.command} {kind}"
        self.cluster.calls.append(call)
        if call in self.cluster.refuse:
            self._body()
            return self._say(self.cluster.refuse[call], {"message": "refused by the test"})
        return method(kind, name, query)

    def _get(self, kind: str, name: str, query: dict[str, str]) -> None:
        if kind == "pods" and query.get("watch") in ("True", "true", "1"):
            self._watch(query)
        elif name:
            self._answer_with(kind, name, lambda thing: thing)
        else:
            with self.cluster.lock:
                found = [
                    copy.deepcopy(thing)
                    for thing in self.cluster.kinds[kind].values()
                    if _selected(thing, query)
                ]
                version = str(max((v for v, _, _ in self.cluster.log), default=0))
            self._say(200, {"metadata": {"resourceVersion": version}, "items": found})

    def _post(self, kind: str, name: str, query: dict[str, str]) -> None:
        thing = self._body()
        with self.cluster.lock:
            if thing["metadata"]["name"] in self.cluster.kinds[kind]:
                return self._say(409, {"message": "AlreadyExists"})
            self.cluster.create(kind, thing)
        return self._say(201, thing)

    def _delete(self, kind: str, name: str, query: dict[str, str]) -> None:
        grace = {**query, **(self._body() or {})}.get("gracePeriodSeconds")

        def delete(thing: Object) -> Object:
            self.cluster.delete(kind, thing, None if grace is None else int(grace))
            return thing

        self._answer_with(kind, name, delete)

    def _patch(self, kind: str, name: str, query: dict[str, str]) -> None:
        body = self._body()

        def patch(thing: Object) -> Object:
            thing["spec"].update(body["spec"])
            thing["metadata"].setdefault("annotations", {}).update(
                body["metadata"].get("annotations", {})
            )
            self.cluster.put(kind, thing)
            return thing

        self._answer_with(kind, name, patch)

    def _watch(self, query: dict[str, str]) -> None:
        since = int(query["resourceVersion"])
        deadline = time.monotonic() + int(query["timeoutSeconds"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with self.cluster.lock:
            if since < self.cluster.forgotten:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                return self._line({"type": "ERROR", "object": gone})
            while time.monotonic() < deadline:
                for version, event, pod in self.cluster.log:
                    if version > since:
                        since = version
                        if _selected(pod, query):
                            self._line({"type": event, "object": pod})
                self.cluster.lock.wait(max(0.0, deadline - time.monotonic()))
        return None

    def _line(self, event: Object) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()

    def _target(self) -> tuple[str, str, dict[str, str]]:
        """(kind, name or "", query) of the request."""
        url = urlsplit(self.path)
        parts = url.path.strip("/").removeprefix(JOBSETS).removeprefix("api/v1").strip("/")
        words = parts.split("/")
        if words[0] == "namespaces":
            assert words[1] == "train", f"the namespace of the tests, not {words[1]}"
            words = words[2:]
        kind, name = words[0], words[1] if len(words) > 1 else ""
        assert (kind == "jobsets") == (JOBSETS in url.path), self.path
        return kind, name, dict(parse_qsl(url.query))

    def _answer_with(self, kind: str, name: str, action: Any) -> None:
        with self.cluster.lock:
            if name not in self.cluster.kinds[kind]:
                return self._say(404, {"message": f"{kind} {name} not found"})
            answer = copy.deepcopy(action(self.cluster.kinds[kind][name]))
        return self._say(200, answer)

    def _say(self, status: int, body: Object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length)) if length else None


def _selected(thing: Object, query: dict[str, str]) -> bool:
    wanted = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(thing["metadata"].get("labels", {}).get(key) == value for key, value in wanted)


class KubernetesHarness(Harness):
    name = "kubernetes"
    switch_label = "test/switch"

    def __init__(self, run_dir: Path, cluster: FakeCluster, url: str) -> None:
        options = {
            "api": url,
            "image": "megascale:test",
            "claim": "none",
            "namespace": "train",
            "gpus": False,
            "switch_label": self.switch_label,
            "grace_s": 2,
            "allocate_s": 3.0,
            "replenish_s": 1.0,
            "kill_deadline_s": 5.0,
        }
        super().__init__(run_dir, options)
        self.cluster = cluster

    def leftovers(self) -> list[str]:
        return [
            name for kind in ("pods", "jobsets", "secrets") for name in self.cluster.kinds[kind]
        ]
