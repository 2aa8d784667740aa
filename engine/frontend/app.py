"""The HTTP application: routes, health, and the gate before them. Owns no request: each belongs to its API's module.

Every failure leaves as JSON of one shape with the right status, never as a stack trace. Health is judged by the
leader's heartbeat alone and makes no work for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import secrets
import time
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import engine
from engine.config import EngineConfig
from engine.frontend import answers, limits, native, openai
from engine.frontend.admission import ModelFacts, usable
from engine.frontend.answers import error_answer, json_answer
from engine.frontend.errors import ApiError, invalid
from engine.frontend.generation import Service
from engine.frontend.link import EngineLink
from engine.frontend.tokenizer import Tokenizer
from engine.model.source import ModelSource
from engine.types import Books, StageStatus

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ready")
"""What needs no key."""
FLUSH_SECONDS_MAX = 600.0


class FrontEnd:
    """What the routes stand on: the link, the model's source, and, once the leader is ready, the service."""

    def __init__(
        self, config: EngineConfig, source: ModelSource, tokenizer: Tokenizer, link: EngineLink
    ) -> None:
        self.config = config
        self.source = source
        self.tokenizer = tokenizer
        self.link = link
        self.started = int(time.time())
        self._service: Service | None = None

    @property
    def service(self) -> Service:
        """What takes requests. Raises ApiError 503 while there is none yet, or none any more."""
        if self.link.ended.done():
            raise ApiError(503, self.link.ended.result().message)
        if self._service is None:
            raise ApiError(503, "the model is still loading")
        return self._service

    async def begin(self) -> None:
        """Wait for the leader's first word and open the service with what was agreed."""
        ready, config = await asyncio.shield(self.link.ready), self.config
        seed = config.random_seed
        if seed is None:
            seed = secrets.randbits(63)
            log.info("--random-seed absent: drawn is %d", seed)
        facts = ModelFacts(
            name=config.served_model_name or self.source.name,
            vocabulary_size=self.source.spec.vocabulary_size,
            context_length=ready.context_length,
            eos_ids=self.source.spec.eos_ids,
            random_seed=seed,
            suggestions=usable(self.source.generation_defaults),
            capacity_tokens=ready.capacity_tokens,
            page_size=ready.page_size,
            sequences_max=ready.max_running_requests + config.max_queued_requests,
        )
        self._service = Service(self.link, facts, self.tokenizer)

    def drain(self) -> None:
        """Take no more requests, let what runs go on, and ask the leader to end after it."""
        if self._service is not None:
            self._service.draining = True
        self.link.drain()

    def complaint(self) -> str | None:
        """Why the service is not healthy; None if it is."""
        try:
            _ = self.service
        except ApiError as error:
            return error.message
        if self.link.pulse_age > limits.PULSE_SECONDS_MAX:
            return f"the leader has been silent for {self.link.pulse_age:.1f} seconds"
        if self.link.pulse is not None and self.link.pulse.stuck:
            return f"work is pending, but no step has finished for {self.config.watchdog_timeout} seconds"
        return None


def build_app(front: FrontEnd) -> ASGIApp:
    """The whole application over a front end."""
    app = FastAPI(
        title="Lockstep", version=engine.__version__, openapi_url=None, docs_url=None, redoc_url=None
    )
    routes = _Routes(front)
    for method, path, route in (
        ("POST", "/generate", routes.generate),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name}", routes.model),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/chat/completions", routes.chat_completions),
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", "/server_info", routes.server_info),
        ("GET", "/get_server_info", routes.server_info),
        ("GET", "/model_info", routes.model_info),
        ("GET", "/get_model_info", routes.model_info),
        ("POST", "/flush_cache", routes.flush_cache),
        ("POST", "/abort_request", routes.abort_request),
    ):
        app.add_api_route(path, route, methods=[method], name=path)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_any_error)
    return Gate(app, front.config.api_key)


class AbortBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of `/abort_request`."""

    rid: Annotated[str, Meta(max_length=limits.RID_CHARACTERS_MAX)] | None = None
    abort_all: bool | None = None


class _Routes:
    """One method per route."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def generate(self, request: Request) -> Response:
        """SGLang's native route."""
        return await native.generate(self._front.service, request)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        return await openai.completions(self._front.service, request)

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await openai.chat_completions(self._front.service, request)

    async def models(self) -> Response:
        """The one model that is served, as a list."""
        model = openai.model(self._front.service, self._front.started)
        return json_answer({"object": "list", "data": [model]})

    async def model(self, name: str) -> Response:
        """The one model that is served, by its name."""
        openai.check_model(self._front.service, name)
        return json_answer(openai.model(self._front.service, self._front.started))

    async def health(self) -> Response:
        """200 while the service can answer; else 503 with the reason."""
        return _state(self._front.complaint())

    async def ready(self) -> Response:
        """200 while the service takes new requests; else 503 with the reason."""
        complaint = self._front.complaint()
        if complaint is None:
            try:
                self._front.service.check_open()
            except ApiError as error:
                complaint = error.message
        return _state(complaint)

    async def server_info(self) -> Response:
        """Resolved flags, version, and the state of every rank, taken at one step."""
        front, service = self._front, self._front.service
        result = await front.link.control("status", limits.CONTROL_SECONDS_MAX)
        if not result.ok:
            raise ApiError(503, result.message)
        agreed, flags = front.link.ready.result(), dataclasses.asdict(front.config)
        del flags["api_key"]
        flags |= {
            "served_model_name": service.facts.name,
            "random_seed": service.facts.random_seed,
            "context_length": agreed.context_length,
            "max_total_tokens": agreed.capacity_tokens,
            "max_running_requests": agreed.max_running_requests,
            "page_size": agreed.page_size,
            "chunked_prefill_size": agreed.chunked_prefill_size,
            "threads_per_rank": agreed.threads_per_rank,
            "dtype": agreed.dtype,
            "kv_cache_dtype": agreed.kv_cache_dtype,
            "device": agreed.device,
        }
        return json_answer(
            flags | {"version": engine.__version__, "stages": [_stage(stage) for stage in result.stages]}
        )

    async def model_info(self) -> Response:
        """What the model is, for clients that ask before they send."""
        facts = self._front.service.facts
        return json_answer(
            {
                "model_path": str(self._front.source.path),
                "served_model_name": facts.name,
                "is_generation": True,
                "context_length": facts.context_length,
                "vocab_size": facts.vocabulary_size,
                "architecture": self._front.source.spec.architecture,
            }
        )

    async def flush_cache(self, request: Request) -> Response:
        """Drop all cached prefixes; 400 while requests run, after waiting for `?timeout=` seconds."""
        link, patience = self._front.service.link, _seconds(request.query_params.get("timeout", "0"))
        if not link.live_count:
            # The last answer may have reached its client before the ranks have settled its last steps.
            patience = max(patience, limits.SETTLE_SECONDS_MAX)
        deadline = time.monotonic() + patience
        while True:
            complaint = f"{link.live_count} requests are running or waiting"
            if not link.live_count:
                result = await link.control("flush", limits.CONTROL_SECONDS_MAX)
                if result.ok:
                    return json_answer({"success": True, "message": "the cache is empty"})
                complaint = result.message
            if time.monotonic() >= deadline:
                raise ApiError(400, complaint)
            await asyncio.sleep(limits.FLUSH_PAUSE_SECONDS)

    async def abort_request(self, request: Request) -> Response:
        """End a call by its name, or all; 200 also for a name that nobody uses."""
        service = self._front.service
        body = await answers.received(request, service.text_threads, AbortBody)
        if body.abort_all:
            service.abort_all()
        elif body.rid is None:
            raise invalid("rid", "is absent: allowed is the name of a request, or abort_all true")
        else:
            service.abort(body.rid)
        return json_answer({"success": True})


class Gate:
    """Stands before the application: the key, and the size of bodies, which are never read past their limits.

    A body counts until its call has been answered, for so long it is held.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401, 408, 413 or 503."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        error = self._objection(scope["path"], headers)
        if error is not None:
            response = error_answer(error)
            response.headers["connection"] = "close"
            return await response(scope, receive, send)
        size = 0
        deadline: float | None = asyncio.get_running_loop().time() + limits.BODY_SECONDS_MAX

        async def bounded() -> Message:
            nonlocal size, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, f"the body took too long: allowed are {limits.BODY_SECONDS_MAX} seconds"
                ) from None
            if not message.get("more_body", False):
                deadline = None  # the body is here; what follows is the client's leaving
            got = len(message.get("body", b""))
            size += got
            self._held_bytes += got
            if size > limits.BODY_BYTES_MAX:
                raise _too_large(size)
            if self._held_bytes > limits.BODIES_BYTES_MAX:
                raise ApiError(
                    503, f"the calls under way have bodies of over {limits.BODIES_BYTES_MAX} bytes together"
                )
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._held_bytes -= size

    def _objection(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        given = headers.get(b"authorization", b"")
        guarded = self._expected is not None and path not in OPEN_PATHS
        if guarded and not hmac.compare_digest(given, self._expected or b""):
            return ApiError(401, "authorization: allowed is the server's key as a bearer token")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limits.BODY_BYTES_MAX:
            return _too_large(int(length))
        return None


def _too_large(size: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes or more: allowed are {limits.BODY_BYTES_MAX}")


def _state(complaint: str | None) -> Response:
    if complaint is None:
        return json_answer({"status": "ok"})
    return json_answer({"status": "unavailable", "reason": complaint}, 503, {"retry-after": "1"})


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) <= FLUSH_SECONDS_MAX:
            return seconds
    raise invalid("timeout", f"is {text!r}: allowed is 0 to {FLUSH_SECONDS_MAX} seconds")


def _stage(stage: StageStatus) -> dict[str, Any]:
    """One rank's state without the tags of the wire."""
    shown = msgspec.structs.asdict(stage)
    return {
        name: msgspec.structs.asdict(value) if isinstance(value, Books) else value
        for name, value in shown.items()
    }


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return error_answer(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException), error
    response = error_answer(
        ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    )
    response.headers.update(error.headers or {})
    return response


async def _on_any_error(_: Request, error: Exception) -> Response:
    """A fault of ours; the framework logs it."""
    return error_answer(answers.INTERNAL)
