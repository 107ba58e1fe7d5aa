"""The driver's HTTP API, over the desk: `messages.py` and `people.py`. OpenAPI: /openapi.json.

`gate.py` stands before it: here, everybody has the token and nothing is too large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from megascale import __version__
from megascale.cluster.driver.desk import Desk
from megascale.cluster.driver.refusals import RefusedError
from megascale.cluster.driver.status import status_of
from megascale.cluster.job import OVER
from megascale.cluster.messages import (
    POLL_S,
    Command,
    Count,
    Heard,
    Heartbeat,
    Join,
    Joined,
    Name,
    Result,
)
from megascale.cluster.people import Accepted, EvictRequest, Status, UpdateRequest
from megascale.cluster.transitions import EvictRequested, StopRequested, UpdateRequested
from megascale.errors import ConfigError, require_extra

try:
    from fastapi import APIRouter, FastAPI, Query, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
except ImportError:
    raise require_extra("fastapi", "cluster") from None

JOIN_S = 4.0  # an agent waits 5
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "no token, or a wrong one"},
    403: {"description": "this agent is not wanted any more: it ends"},
    404: {"description": "no such node"},
    409: {"description": "it contradicts the job as it is"},
    413: {"description": "the body is too large"},
    503: {"description": "the driver did not decide in time: try again"},
}


def make_app(
    desk: Desk,
    *,
    run_dir: str,
    job_clock: Callable[[], float],
    check_update: Callable[[list[str]], None],
) -> FastAPI:
    """check_update  raises ConfigError for overrides that the configuration refuses."""
    app = FastAPI(title="megascale driver", version=__version__, responses=REFUSALS)
    app.include_router(_for_agents(desk))
    app.include_router(_for_people(desk, run_dir, job_clock, check_update))

    @app.exception_handler(RefusedError)
    async def _refused(_request: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, status_code=error.status)

    @app.exception_handler(RequestValidationError)
    async def _malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        desk.refusals.note("HTTP 422", request.url.path)
        told = [{key: one[key] for key in ("loc", "msg", "type")} for one in error.errors()[:20]]
        return JSONResponse({"detail": told}, status_code=422)

    return app


def _for_agents(desk: Desk) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["agents"])

    @router.post("/join")
    async def join(message: Join) -> Joined:
        answer = asyncio.wrap_future(desk.join(message))
        try:
            return await asyncio.wait_for(answer, JOIN_S)
        except TimeoutError:
            raise desk.refusals.refuse(503, f"the join of {message.node} was not decided") from None

    @router.post("/heartbeat")
    async def heartbeat(message: Heartbeat) -> Heard:
        return desk.heartbeat(message)  # for OpenAPI: the gate answers before

    @router.get("/commands")
    async def commands(
        node: Annotated[Name, Query()],
        incarnation: Annotated[Name, Query()],
        after: Annotated[Count, Query()] = 0,
        wait_s: Annotated[float, Query(ge=0.0, le=POLL_S)] = POLL_S,
    ) -> list[Command]:
        return await _poll(desk, node, incarnation, after, wait_s)

    @router.post("/results")
    async def results(message: Result) -> Heard:
        return desk.result(message)

    return router


def _for_people(
    desk: Desk,
    run_dir: str,
    job_clock: Callable[[], float],
    check_update: Callable[[list[str]], None],
) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["people"])

    @router.get("/status")
    async def status() -> Status:
        return status_of(desk, run_dir, job_clock())

    @router.post("/evict")
    async def evict(message: EvictRequest) -> Accepted:
        nodes = desk.job.nodes
        there = [f"{one.name} ({one.state})" for one in nodes.values() if one.state not in OVER]
        legal = f"nodes that can be evicted: {', '.join(there[:20]) or 'none'}"
        if message.node not in nodes:
            raise desk.refusals.refuse(404, f"there is no node {message.node}; {legal}")
        state = nodes[message.node].state
        if state in OVER:
            raise desk.refusals.refuse(409, f"{message.node} is {state} already; {legal}")
        desk.post(EvictRequested(message.node, message.reason, message.block))
        return Accepted(epoch=desk.job.epoch)

    @router.post("/stop")
    async def stop() -> Accepted:
        desk.post(StopRequested())
        return Accepted(epoch=desk.job.epoch)

    @router.post("/update")
    async def update(message: UpdateRequest) -> Accepted:
        try:
            check_update(message.overrides)
        except ConfigError as error:
            raise desk.refusals.refuse(422, str(error)) from None
        desk.post(UpdateRequested(tuple(message.overrides), message.reason))
        return Accepted(epoch=desk.job.epoch)

    return router


async def _poll(
    desk: Desk, node: str, incarnation: str, after: int, wait_s: float
) -> list[Command]:
    """Until there is a command, or `wait_s` have passed."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(woken.set)

    desk.on_command(node, wake)
    found = desk.commands_after(node, incarnation, after)
    if not found and not desk.is_closed:
        try:
            await asyncio.wait_for(woken.wait(), wait_s)
        except TimeoutError:
            return []
        found = desk.commands_after(node, incarnation, after)
    return found
