"""From a live call to bytes on the wire: JSON answers, event streams, and an eye on the client all the while.

A client that closes its connection ends its call, whether it streams, waits for the whole answer, or still waits in
the queue. An event stream opens only when its first news is there, so that a refusal is an HTTP status and not an
event in a 200. A stream that fails later sends one error event. Every stream ends with `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.frontend import limits
from engine.frontend.bodies import parse_body
from engine.frontend.errors import CLIENT_GONE, ApiError
from engine.frontend.generation import Delta, Generation
from engine.frontend.text_threads import TextThreads

log = logging.getLogger(__name__)

Body = TypeVar("Body")
Result = TypeVar("Result")
INTERNAL = ApiError(500, "the server failed to answer; its log says why")
_DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How an API writes a stream. It keeps what it needs between events."""

    def events(self, delta: Delta) -> Iterable[Any]:
        """The JSON events for what a sequence gained."""
        ...

    def closing(self) -> Iterable[Any]:
        """The JSON events after the last delta of a stream that ended well."""
        ...


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any value of plain JSON types and msgspec structs as a response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_answer(error: ApiError) -> Response:
    """A failure as a response."""
    return json_answer(error.body(), error.status, error.headers())


async def received(
    request: Request, threads: TextThreads, kind: type[Body], *, strict: type[msgspec.Struct] | None = None
) -> Body:
    """The request's body as `kind` (see `parse_body`). Raises ApiError."""
    raw = await request.body()
    if len(raw) <= limits.INLINE_BYTES_MAX:
        return parse_body(raw, kind, strict=strict)
    return await threads.run(parse_body, raw, kind, strict=strict)


async def finished(request: Request, generation: Generation) -> None:
    """Returns once all sequences of a call have ended. Raises ApiError; closes the call in any case."""
    try:
        await while_connected(request, generation.finish())
    finally:
        generation.close()


async def stream(request: Request, generation: Generation, shape: Shape) -> Response:
    """A call as an event stream. Raises ApiError for what fails before its first news."""
    try:
        first = await while_connected(request, generation.next())
    except BaseException:
        generation.close()
        raise
    return _EventStream(generation, first, shape)


class _EventStream(Response):
    """Server-sent events of one call. Owns the call from its construction on."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, first: list[Delta], shape: Shape) -> None:
        # With the last event the connection closes, so that clients which read to its end see one.
        super().__init__(headers={"cache-control": "no-cache", "connection": "close"})
        # The length of a stream is not known.
        del self.headers["content-length"]
        self._generation = generation
        self._first = first
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._generation.close()
            await _cancel(writing, leaving)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            deltas = self._first
            while True:
                events = [event for delta in deltas for event in self._shape.events(delta)]
                await self._send_events(send, events)
                if self._generation.done:
                    break
                deltas = await self._generation.next()
            await self._send_events(send, self._shape.closing())
        except ApiError as error:
            await self._send_events(send, [error.body()])
        except Exception:
            log.exception("a stream failed")
            await self._send_events(send, [INTERNAL.body()])
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _send_events(self, send: Send, events: Iterable[Any]) -> None:
        body = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves. Raises ApiError 499 then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_departure(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(CLIENT_GONE, "the client closed the connection")
    finally:
        await _cancel(working, leaving)


async def _departure(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
