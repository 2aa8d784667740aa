"""The front end's one link to the leader: requests out, news in, over a stream socket of frames.

It numbers requests and controls, never using a number twice, and hands each piece of news to the inbox of the call
it belongs to. News of a request that has ended is dropped. When the link ends, or the leader says that the service
does, every live request gets an abort emission at once. The reader never waits for a slow client: an inbox holds at
most one emission per generated token and prompt chunk of its requests, which bounds it by what was admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from engine.distributed import frames
from engine.distributed.launch import ExitCode
from engine.frontend.errors import ApiError
from engine.types import (
    Abort,
    Control,
    ControlAction,
    ControlResult,
    Emission,
    Emissions,
    Fatal,
    Finish,
    FinishReason,
    Pulse,
    Ready,
    Refused,
    Request,
    Submit,
)

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024
_NEWS: msgspec.msgpack.Decoder[Ready | Emissions | Refused | ControlResult | Pulse | Fatal] = (
    msgspec.msgpack.Decoder(Ready | Emissions | Refused | ControlResult | Pulse | Fatal)
)


class Inbox:
    """News of the requests of one call, in order of arrival, for one reader."""

    def __init__(self) -> None:
        self._news: deque[Emission] = deque()
        self._arrived = asyncio.Event()

    def put(self, emission: Emission) -> None:
        """Add news; never waits."""
        self._news.append(emission)
        self._arrived.set()

    async def take(self) -> list[Emission]:
        """All news there is, at least one piece; waits for it."""
        await self._arrived.wait()
        self._arrived.clear()
        news = list(self._news)
        self._news.clear()
        return news


class EngineLink:
    """A live connection to the leader. Make it with `open`; all methods belong to the event loop that opened it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._live: dict[int, Inbox] = {}
        self._controls: dict[int, asyncio.Future[ControlResult]] = {}
        self._asking: dict[ControlAction, asyncio.Task[ControlResult]] = {}
        self._request_ids = itertools.count(1)
        self._control_ids = itertools.count(1)
        self._pulse_time = time.monotonic()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        """What the service agreed on; done once the leader has said so."""
        self.ended: asyncio.Future[Fatal] = loop.create_future()
        """Why the service is over; done when it is."""
        self.pulse: Pulse | None = None
        """The leader's last heartbeat."""
        self._reading = loop.create_task(self._read(reader), name="engine link")

    @staticmethod
    async def open(address: str | socket.socket) -> EngineLink:
        """Connect to a unix socket by its path, or take over a connected socket. Raises OSError."""
        if isinstance(address, socket.socket):
            address.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=address)
        else:
            reader, writer = await asyncio.open_unix_connection(address)
        return EngineLink(reader, writer)

    @property
    def live_count(self) -> int:
        """Requests that have not ended yet, as far as is known here."""
        return len(self._live)

    @property
    def pulse_age(self) -> float:
        """Seconds since the leader last said anything."""
        return time.monotonic() - self._pulse_time

    @property
    def unsent_bytes(self) -> int:
        """What has been written and the leader has not read."""
        return self._writer.transport.get_write_buffer_size()

    def take_id(self) -> int:
        """A number for a new request."""
        return next(self._request_ids)

    def submit(self, requests: Iterable[Request]) -> Inbox:
        """Send requests, accepted or refused together. Returns where their news arrives."""
        requests = tuple(requests)
        inbox = Inbox()
        self._live.update((request.request_id, inbox) for request in requests)
        if self.ended.done():
            self._abort_all(self.ended.result())
        else:
            self._send(Submit(requests=requests))
        return inbox

    def abort(self, request_id: int, message: str, status: int) -> None:
        """Ask for the end of a request; its inbox still gets the abort emission. Nothing if it has ended."""
        if request_id in self._live:
            self._send(Abort(request_id=request_id, message=message, status=status))

    def finish(self, request_id: int, kept_tokens: int, matched: str) -> None:
        """End a request at a stop string; later news of it is dropped."""
        if self._live.pop(request_id, None) is not None:
            self._send(Finish(request_id=request_id, kept_tokens=kept_tokens, matched=matched))

    def forget(self, request_id: int) -> None:
        """Drop all further news of a request."""
        self._live.pop(request_id, None)

    async def control(self, action: ControlAction, timeout: float) -> ControlResult:
        """Ask something of the service as a whole. Raises ApiError 503 when no answer comes in time.

        Each control is an entry of the log, so whoever asks for what is being asked already shares its answer. That
        is as good as one of its own: no request sent since has had any news yet.
        """
        if self.ended.done():
            raise ApiError(503, self.ended.result().message)
        asking = self._asking.get(action)
        if asking is None:
            asking = asyncio.get_running_loop().create_task(self._ask(action, timeout))
            self._asking[action] = asking
            asking.add_done_callback(lambda task: self._asked(action, task))
        return await asyncio.shield(asking)

    async def _ask(self, action: ControlAction, timeout: float) -> ControlResult:
        control_id = next(self._control_ids)
        answer: asyncio.Future[ControlResult] = asyncio.get_running_loop().create_future()
        self._controls[control_id] = answer
        self._send(Control(action=action, control_id=control_id))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise ApiError(503, f"the leader did not answer `{action}` within {timeout} seconds") from None
        finally:
            del self._controls[control_id]

    def _asked(self, action: ControlAction, task: asyncio.Task[ControlResult]) -> None:
        del self._asking[action]
        if not task.cancelled():
            task.exception()  # seen, even when all who asked have gone

    def drain(self) -> None:
        """Ask the service to finish what runs and to end; its answer is the end of the link."""
        self._send(Control(action="drain", control_id=next(self._control_ids)))

    def fail(self, fatal: Fatal) -> None:
        """The service is over: every live request and waiting control fails now. The first reason given stays."""
        if self.ended.done():
            return
        self.ended.set_result(fatal)
        self._abort_all(fatal)
        for answer in self._controls.values():
            if not answer.done():
                answer.set_exception(ApiError(503, fatal.message))

    async def close(self) -> None:
        """Hang up."""
        self.fail(Fatal(exit_code=0, message="the front end has closed its link"))
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()

    # ---- the wire ----

    def _send(self, message: msgspec.Struct) -> None:
        """Write one message. Never waits; what is unsent is bounded by the requests that are live."""
        if not self.ended.done():
            self._writer.write(frames.encode(frames.Kind.MESSAGE, msgspec.msgpack.encode(message)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = frames.Decoder()
        reason = "the leader has closed the link"
        try:
            while data := await reader.read(_READ_BYTES):
                self._pulse_time = time.monotonic()
                for frame in decoder.feed(data):
                    self._receive(frame)
        except (OSError, msgspec.MsgspecError) as error:
            reason = f"the link to the leader broke: {error}"
        self.fail(Fatal(exit_code=ExitCode.RANK_LOST, message=f"the service has lost rank 0: {reason}"))

    def _receive(self, frame: frames.Frame) -> None:
        if not frame.body:
            return  # a bare heartbeat
        match _NEWS.decode(frame.body):
            case Emissions(emissions=emissions):
                for emission in emissions:
                    self._deliver(emission)
            case Pulse() as pulse:
                self.pulse = pulse
            case Refused(request_ids=request_ids, status=status, message=message):
                self._abort(request_ids, status, message)
            case ControlResult() as result:
                answer = self._controls.get(result.control_id)
                if answer is not None and not answer.done():
                    answer.set_result(result)
            case Ready() as ready:
                if not self.ready.done():
                    self.ready.set_result(ready)
            case Fatal() as fatal:
                self.fail(fatal)

    def _deliver(self, emission: Emission) -> None:
        inbox = self._live.get(emission.request_id)
        if inbox is None:
            return
        inbox.put(emission)
        if emission.finish is not None:
            del self._live[emission.request_id]

    def _abort(self, request_ids: Iterable[int], status: int, message: str) -> None:
        reason = FinishReason(type="abort", message=message, status=status)
        for request_id in request_ids:
            self._deliver(Emission(request_id=request_id, first_position=0, finish=reason))

    def _abort_all(self, fatal: Fatal) -> None:
        self._abort(list(self._live), 503, fatal.message)
