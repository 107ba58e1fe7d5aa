"""The routes: each a line or two over a feed. OpenAPI: /openapi.json.

    GET  /                       the page, and /page/FILE
    GET  /api/overview           the run at a glance, and the driver's part
    GET  /api/read/{reader}      ?first=&last=&ranks=&OPTION=: a reader's answer; /api/readers: all
    GET  /api/places             the mesh, hosts, what each rank was last seen in
    GET  /api/spans              ?first=&last=&ranks=
    GET  /api/metrics            ?after=: lines of metrics.jsonl as columns
    GET  /api/log                ?rank=&after=: its end; without a rank the first errors
    GET  /api/driver             status of the driver, where one is
    GET  /api/events             server-sent events: state, incident, driver
    POST /api/requests           with the token: spans or a profile of a live run;
         /api/requests/{name}    GET: who answered
    POST /api/evict              with the token: a node leaves the job

`guard.py` stands before it: whoever comes here may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Annotated, Any

from megascale import __version__
from megascale.errors import MegascaleError, require_extra
from megascale.telemetry.dashboard.actions import (
    EvictRequest,
    RanksRequest,
    evict,
    request,
    request_answers,
)
from megascale.telemetry.dashboard.answers import Body, RefusedError, json_body, negotiate
from megascale.telemetry.dashboard.driver import RefusedByDriverError
from megascale.telemetry.dashboard.events import EventStream
from megascale.telemetry.dashboard.feeds import logs, overview, places, readers, spans
from megascale.telemetry.dashboard.state import State
from megascale.telemetry.dashboard.static import page_files

try:
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
except ImportError:
    raise require_extra("fastapi", "telemetry") from None

ANSWER_S = 30.0  # 12,288 ranks, a thousand steps: two seconds
_Rank = Annotated[int | None, Query(ge=0, lt=10_000_000)]
_After = Annotated[int, Query(ge=0, lt=2**53)]


def make_app(state: State) -> FastAPI:
    """The routes over `state`, which whoever serves them starts and closes."""
    app = FastAPI(title="megascale dashboard", version=__version__, docs_url=None, redoc_url=None)
    _serve_page(app)
    _serve_run(app, state)
    _serve_files(app, state)
    _serve_actions(app, state)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RefusedByDriverError, _refused)
    app.add_exception_handler(MegascaleError, _impossible)
    app.add_exception_handler(RequestValidationError, _malformed)
    return app


def _serve_page(app: FastAPI) -> None:
    for path, body in page_files().items():
        app.add_api_route(path, _static(body), methods=["GET", "HEAD"], include_in_schema=False)


def _static(body: Body) -> Callable[[Request], Any]:
    async def file(request: Request) -> Response:
        return _respond(request, body)

    return file


def _serve_run(app: FastAPI, state: State) -> None:
    """What needs the run itself: asked in the one thread that has it."""

    @app.get("/api/readers")
    async def all_readers() -> Any:
        return readers.listed(state.readers)

    @app.get("/api/read/{reader}")
    async def read(request: Request, reader: str) -> Response:
        chosen = readers.reader_named(state.readers, reader)
        query = dict(request.query_params)
        asked = state.ask_reader(chosen, readers.window_of(query), query)
        return await _answered(request, asked)

    @app.get("/api/places")
    async def all_places(request: Request) -> Response:
        return await _answered(request, state.live.ask("places", places.places))

    @app.get("/api/spans")
    async def some_spans(
        request: Request,
        first: str | None = None,
        last: str | None = None,
        ranks: str | None = None,
    ) -> Response:
        given = {"first": first, "last": last, "ranks": ranks}
        window = readers.window_of({k: v for k, v in given.items() if v is not None})
        key = ("spans", first, last, window.ranks)
        asked = state.live.ask(key, lambda run: spans.spans(run, window))
        return await _answered(request, asked)


def _serve_files(app: FastAPI, state: State) -> None:
    """What is in memory, or in small files of the run's folder."""

    @app.get("/api/overview")
    async def glance(request: Request) -> Response:
        return _respond(request, json_body(state.overview()))

    @app.get("/api/metrics")
    async def metrics(request: Request, after: _After = 0) -> Response:
        lines, start = state.metrics()
        body = {"starts": start, **overview.metric_columns(lines, after)}
        return _respond(request, json_body(body))

    @app.get("/api/log")
    def log(rank: _Rank = None, after: Annotated[int | None, Query(ge=0)] = None) -> Any:
        if rank is None:
            return logs.first_errors(state.run_dir)
        return logs.tail(state.run_dir, rank, after)

    @app.get("/api/driver")
    async def driver(request: Request) -> Response:
        return _respond(request, json_body(state.driver()))

    # an object is an ASGI application of its own to the router, whatever its annotation says
    stream: Any = EventStream(state.hub)
    app.add_route("/api/events", stream, methods=["GET"], include_in_schema=False)


def _serve_actions(app: FastAPI, state: State) -> None:
    """What changes something; the guard has seen the token."""

    @app.post("/api/requests", status_code=202)
    def ask_ranks(message: RanksRequest) -> Mapping[str, Any]:
        return request(state.run_dir, message)

    @app.get("/api/requests/{name}")
    def answers(name: str) -> Mapping[str, Any]:
        return request_answers(state.run_dir, name)

    @app.post("/api/evict", status_code=202)
    def evict_node(message: EvictRequest) -> Mapping[str, Any]:
        return evict(state.driver_client(), message)

    @app.post("/api/token")
    async def token() -> Mapping[str, bool]:
        return {"ok": True}  # the page asks whether what it was given is the token


async def _answered(request: Request, asked: Future[Body]) -> Response:
    future = asyncio.wrap_future(asked)
    try:
        body = await asyncio.wait_for(asyncio.shield(future), ANSWER_S)
    except TimeoutError:
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise RefusedError(
            503, f"no answer within {ANSWER_S:.0f} s; ask for fewer steps or ranks, or later"
        ) from None
    # gzip of a large body is milliseconds: not in the loop that serves everybody
    await asyncio.to_thread(lambda: body.compressed)
    return _respond(request, body)


def _respond(request: Request, body: Body) -> Response:
    headers = {name.lower(): value for name, value in request.headers.items()}
    status, out, content = negotiate(body, headers)
    return Response(content, status, out)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError | RefusedByDriverError), error
    detail = error.detail if isinstance(error, RefusedError) else str(error)
    return JSONResponse({"detail": detail}, status_code=error.status)


async def _impossible(_request: Request, error: Exception) -> Response:
    """A reader's DataError: this cannot be asked of this run; or the driver does not answer."""
    return JSONResponse({"detail": str(error)}, status_code=422)


async def _malformed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return JSONResponse({"detail": told[:500]}, status_code=422)
