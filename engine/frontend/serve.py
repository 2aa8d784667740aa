"""The front end's process: the HTTP server, the link and the signals, from the first connection to the exit code.

Waits for the leader, serves, and ends when the service does: drained after SIGTERM, told so by the leader, or left
without one. Whatever ends it, live calls get their error before the process goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.config import ConfigError, EngineConfig
from engine.distributed.launch import ExitCode
from engine.frontend.app import FrontEnd, build_app
from engine.frontend.link import EngineLink
from engine.frontend.tokenizer import Tokenizer
from engine.model.source import ModelSource
from engine.types import Fatal, Ready

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 2
"""How long live calls have to send their last event once the service is over."""
DRAIN_SLACK_SECONDS = 10.0
"""How much longer than --drain-timeout the leader may take to end."""
KEEP_ALIVE_SECONDS = 65
HEAD_BYTES_MAX = 64 * 1024
"""A request's first line and headers."""
SECOND_SIGNAL = 128 + signal.SIGTERM


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that listens on --host and --port. Raises ConfigError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # at once: until then another service could bind the same port
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror or error})"
        ) from None
    return listener


def run(
    config: EngineConfig,
    source: ModelSource,
    tokenizer: Tokenizer,
    leader: str | socket.socket,
    listener: socket.socket,
    *,
    on_ready: Callable[[Ready, str], None] | None = None,
    watch: Callable[[], Awaitable[Fatal]] | None = None,
) -> Fatal:
    """Serve until the service ends; returns why it did, with the process' exit code.

    `leader` is a unix socket's path or a connected socket, `listener` what `open_listener` returned. `on_ready` is
    told what was agreed and the service's URL. `watch` returns when something else ends the service, like a child
    that died, and says why; the leader's own word goes first.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, source, tokenizer, leader, listener, on_ready, watch))


async def _serve(
    config: EngineConfig,
    source: ModelSource,
    tokenizer: Tokenizer,
    leader: str | socket.socket,
    listener: socket.socket,
    on_ready: Callable[[Ready, str], None] | None,
    watch: Callable[[], Awaitable[Fatal]] | None,
) -> Fatal:
    link = await EngineLink.open(leader)
    front = FrontEnd(config, source, tokenizer, link)
    server = _Server(
        uvicorn.Config(
            build_app(front),
            http=_BoundedHead,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FAREWELL_SECONDS,
        )
    )
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    http = asyncio.create_task(_guarded(link, _answer(link, server, listener)))
    others = [asyncio.create_task(_guarded(link, _begin(front, url, on_ready)))]
    if watch is not None:
        others.append(asyncio.create_task(_guarded(link, _watch(link, watch))))
    _Signals(front, server, config.drain_timeout).install()
    fatal = await asyncio.shield(link.ended)
    server.should_exit = True
    for task in others:
        task.cancel()
    await asyncio.gather(http, *others, return_exceptions=True)
    await link.close()
    return fatal


async def _guarded(link: EngineLink, work: Coroutine[Any, Any, None]) -> None:
    """A part of the front end that fails takes the service with it, rather than leave it half alive."""
    try:
        await work
    except Exception as error:
        log.exception("the front end failed")
        link.fail(Fatal(exit_code=ExitCode.RANK_LOST, message=f"the front end failed: {error}"))


async def _answer(link: EngineLink, server: uvicorn.Server, listener: socket.socket) -> None:
    await server.serve(sockets=[listener])
    link.fail(Fatal(exit_code=ExitCode.RANK_LOST, message="the HTTP server has stopped"))


async def _begin(front: FrontEnd, url: str, on_ready: Callable[[Ready, str], None] | None) -> None:
    await front.begin()
    if on_ready is not None:
        on_ready(front.link.ready.result(), url)
    log.info("serving %s on %s", front.service.facts.name, url)


async def _watch(link: EngineLink, watch: Callable[[], Awaitable[Fatal]]) -> None:
    link.fail(await watch())


class _Signals:
    """SIGTERM and SIGINT: the first drains, the second ends at once."""

    def __init__(self, front: FrontEnd, server: uvicorn.Server, drain_timeout: float) -> None:
        self._front = front
        self._server = server
        self._drain_timeout = drain_timeout
        self._draining: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Take the signals over, in the main thread; elsewhere (in tests) there are none to take."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.arrive)

    def arrive(self) -> None:
        """A signal is here."""
        link = self._front.link
        if self._draining is not None:
            self._server.force_exit = True
            link.fail(Fatal(exit_code=SECOND_SIGNAL, message="ended by a second signal"))
        elif not link.ready.done():
            link.fail(Fatal(exit_code=0, message="stopped during the start"))
        else:
            log.info("draining: no new requests; at most %s seconds for those that run", self._drain_timeout)
            self._front.drain()
            self._draining = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        """The leader says when it is done; should it be too stuck for that, the service ends without it."""
        link, patience = self._front.link, self._drain_timeout + DRAIN_SLACK_SECONDS
        await asyncio.wait((link.ended,), timeout=patience)
        link.fail(
            Fatal(
                exit_code=ExitCode.RANK_LOST, message=f"the service did not drain within {patience} seconds"
            )
        )


class _Server(uvicorn.Server):
    """uvicorn's server without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class _BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol with a limit on what comes before a body; the parser has none of its own."""

    _head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head that goes on for too long is answered with 400."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("the headers are too long")

    def on_message_begin(self) -> None:
        """A new request begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        """Its body begins."""
        self._in_head = False
        return super().on_headers_complete()
