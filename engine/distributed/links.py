"""Links: framed, non-blocking stream connections between our processes, and the poller that watches them.

One control thread owns the `Poller` and all reading; any thread may send. A `Link` is made only of a socket whose
other end is already known to be a friend: an inherited socketpair, or one that `rendezvous.py` has authenticated.
Nothing here blocks except `Poller.poll` and `Poller.flush`, nothing raises because a peer is gone, and nothing
imports torch: a lost link is a value that `poll` returns, once, after everything the peer said before.

    any thread    --send-->  socket, or the backlog when the socket is full  --poll-->  socket
    control thread  poll():  socket -> Decoder -> Received(link, frame) ... Lost(link, reason)
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from engine.distributed.frames import BODY_BYTES_MAX, Decoder, Frame, FrameError, Kind, encode_header

BACKLOG_BYTES_MAX = 1 << 30
"""Most bytes that wait for a slow peer before the link counts as lost."""
READ_BYTES = 256 * 1024
"""One read from a socket, unless a large body is under way."""
TURN_BYTES = 8 * 1024 * 1024
"""Most bytes read from one link before the others have their turn."""
PAUSE_S = 1.0
"""Polls further apart than this mean that this process stood still."""
BUFFERS_PER_CALL = 64
"""Buffers handed to one sendmsg; the kernel takes at most 1,024."""

Buffer = bytes | bytearray | memoryview


class Link:
    """One stream connection to a known peer. Sending never blocks and never raises for a peer that is gone."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        body_bytes_max: int = BODY_BYTES_MAX,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        """Take over `sock`, connected and of a trusted peer. `name` says in messages who that is: "rank 1"."""
        sock.setblocking(False)
        self.name = name
        self._socket = sock
        self._decoder = Decoder(body_bytes_max)
        self._backlog_bytes_max = backlog_bytes_max
        self._lock = threading.Lock()
        # The lock guards all of these; sending threads and the poller share them.
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._failure: str | None = None
        self._poller: Poller | None = None
        self._sent_at = time.monotonic()
        # Only the poller's thread touches these.
        self._received_at = self._sent_at
        self._heartbeats = True
        self._watches_writes = False

    def __repr__(self) -> str:
        return f"<link to {self.name}>"

    def fileno(self) -> int:
        """The socket's number, for a selector."""
        return self._socket.fileno()

    @property
    def backlog_bytes(self) -> int:
        """Bytes given to `send` that the kernel has not taken yet."""
        return self._backlog_bytes

    def send(self, kind: Kind, *buffers: Buffer, epoch: int = 0, step: int = 0, digest: int = 0) -> None:
        """Send one frame whose body is `buffers` joined. From any thread; frames of one thread keep their order.

        What the kernel takes at once is gone when this returns; the rest waits, uncopied, so nobody may write to
        the buffers afterwards. Views are of single bytes. Sending on a failed link does nothing: `poll` tells.
        Not for signal handlers, which may interrupt a send half done.
        """
        header = encode_header(kind, *buffers, epoch=epoch, step=step, digest=digest)
        parts = [memoryview(header), *(memoryview(buffer) for buffer in buffers if len(buffer))]
        with self._lock:
            if self._failure is not None:
                return
            idle = not self._backlog
            self._backlog.extend(parts)
            self._backlog_bytes += sum(map(len, parts))
            if idle:
                self._write()
            if self._backlog_bytes > self._backlog_bytes_max:
                self._fail(f"does not read: {self._backlog_bytes} bytes wait for it")
            self._sent_at = time.monotonic()
            needs_poller = bool(self._backlog) or self._failure is not None
        if needs_poller and self._poller is not None:
            self._poller.wake()

    def close(self) -> None:
        """Close the socket. What still waits to be sent is dropped."""
        with self._lock:
            self._fail("closed")
            self._socket.close()

    def _fail(self, reason: str) -> None:
        """Send nothing from now on. The poller reads what has arrived, then reports the loss. Lock held."""
        if self._failure is None:
            self._failure = reason
        self._backlog.clear()
        self._backlog_bytes = 0

    def _write(self) -> None:
        """Hand waiting bytes to the kernel until it takes no more. Lock held."""
        while self._backlog:
            batch = [self._backlog[place] for place in range(min(len(self._backlog), BUFFERS_PER_CALL))]
            try:
                sent = self._socket.sendmsg(batch)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(f"is gone ({error.strerror or error})")
                return
            self._backlog_bytes -= sent
            while sent:
                first = self._backlog[0]
                if sent < len(first):
                    self._backlog[0] = first[sent:]
                    break
                sent -= len(first)
                self._backlog.popleft()

    def _read(self, scratch: memoryview) -> Iterator[Frame]:
        """Frames that have arrived. Raises ConnectionError with the reason when the peer is gone or talks nonsense."""
        budget = TURN_BYTES
        while budget > 0:
            room = self._decoder.room()
            place = scratch if room is None else room
            try:
                count = self._socket.recv_into(place)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionError(f"is gone ({error.strerror or error})") from None
            if count == 0:
                raise ConnectionError("is gone (end of file)")
            self._received_at = time.monotonic()
            budget -= count
            if room is None:
                yield from self._decoder.feed(scratch[:count])
            else:
                frame = self._decoder.filled(count)
                if frame is not None:
                    yield frame
            if count < len(place):
                return


@dataclass(frozen=True, slots=True)
class Received:
    """A frame came in."""

    link: Link
    frame: Frame


@dataclass(frozen=True, slots=True)
class Lost:
    """A link is gone; it has been closed and left the poller. The last event of its link."""

    link: Link
    reason: str
    """What happened, to be read after the peer's name: "is gone (end of file)", "was silent for 2.0 s"."""

    def __str__(self) -> str:
        return f"{self.link.name} {self.reason}"


Event = Received | Lost


class Poller:
    """Waits for all links of one thread at once; blocked, hence free of cost, when nothing happens.

    `pulse_s`: a link on which nothing was sent for so long gets an empty PULSE frame. `silence_s`: a link from
    which nothing came for so long is lost. Both may be assigned at any time (a longer silence while weights load).
    Only `wake` may be called from another thread.
    """

    def __init__(self, *, pulse_s: float = 0.5, silence_s: float = 2.0) -> None:
        self.pulse_s = pulse_s
        self.silence_s = silence_s
        self._selector = selectors.DefaultSelector()
        self._links: list[Link] = []
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._asked_at = time.monotonic()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    def add(self, link: Link, *, heartbeats: bool = True) -> None:
        """Watch a link. Without heartbeats it gets no PULSE and may be silent; end of file is still a loss."""
        now = time.monotonic()
        link._received_at = now
        link._heartbeats = heartbeats
        with link._lock:
            link._poller = self
        self._links.append(link)
        self._selector.register(link, selectors.EVENT_READ, link)

    def remove(self, link: Link) -> None:
        """Stop watching a link and close it; no Lost event follows."""
        self._links.remove(link)
        self._selector.unregister(link)
        with link._lock:
            link._poller = None
        link.close()

    def wake(self) -> None:
        """Make a `poll` in progress, or the next one, return at once. From any thread or signal handler."""
        # A full pipe means that a wake-up is already on its way; a closed one that nobody waits any more.
        with contextlib.suppress(OSError):
            os.write(self._wake_out, b"\0")

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Wait until something happens, at most `timeout` seconds (None: until then), and say what.

        Events of one link come in order. The list is empty after a wake-up, a time-out, or work of its own.
        """
        events: list[Event] = []
        self._send_backlogs()
        asked_at = time.monotonic()
        self._forgive_pause(asked_at)
        for key, mask in self._selector.select(self._patience(timeout)):
            if isinstance(key.data, Link):
                if mask & selectors.EVENT_WRITE:
                    with key.data._lock:
                        key.data._write()
                if mask & selectors.EVENT_READ:
                    self._receive(key.data, events)
            else:
                self._drain_wakes()
        self._heartbeat(asked_at, events)
        return events

    def flush(self, timeout: float) -> bool:
        """Send what waits on all links, for at most `timeout` seconds; True if all went out. For last words."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as writers:
            for link in self._links:
                writers.register(link, selectors.EVENT_WRITE, link)
            while any(link.backlog_bytes for link in self._links):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                for key, _ in writers.select(remaining):
                    with key.data._lock:
                        key.data._write()
                    if not key.data.backlog_bytes:
                        writers.unregister(key.data)
        return True

    def close(self) -> None:
        """Close all links and the poller itself."""
        for link in list(self._links):
            self.remove(link)
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _patience(self, timeout: float | None) -> float | None:
        """Seconds that `poll` may wait before a pulse or a verdict of silence is due."""
        now = time.monotonic()
        due = [] if timeout is None else [now + timeout]
        for link in self._links:
            if link._failure is not None:
                return 0.0
            if link._heartbeats:
                due.append(link._sent_at + self.pulse_s)
                due.append(link._received_at + self.silence_s)
        return max(min(due) - now, 0.0) if due else None

    def _send_backlogs(self) -> None:
        """Ask the selector for writability of exactly those links on which bytes wait."""
        for link in self._links:
            waits = link.backlog_bytes > 0
            if waits != link._watches_writes:
                link._watches_writes = waits
                mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
                self._selector.modify(link, mask, link)

    def _receive(self, link: Link, events: list[Event]) -> None:
        """Take in what one link has to say."""
        try:
            for frame in link._read(self._scratch):
                if frame.kind is Kind.PULSE and not frame.body:
                    continue
                events.append(Received(link, frame))
        except FrameError as error:
            self._lose(link, f"talks nonsense: {error}", events)
        except ConnectionError as error:
            self._lose(link, str(error), events)

    def _forgive_pause(self, now: float) -> None:
        """A pause of this process may have been one of the whole machine (a snapshot, a frozen container), and then
        of the peers too: it does not count as their silence. Without one, polls are never further apart than this."""
        gap = now - self._asked_at
        self._asked_at = now
        if gap > PAUSE_S:
            for link in self._links:
                link._received_at = min(link._received_at + gap, now)

    def _heartbeat(self, asked_at: float, events: list[Event]) -> None:
        """Send pulses that are due; give up links that failed or are silent.

        Silence is judged at `asked_at`, the moment before the selector was asked: all that had come by then has
        been read, so a pause of this process is never taken for the silence of a peer.
        """
        for link in list(self._links):
            if link._failure is not None:
                self._lose(link, link._failure, events)
            elif link._heartbeats and asked_at - link._received_at >= self.silence_s:
                self._lose(link, f"was silent for {self.silence_s:.1f} s", events)
            elif link._heartbeats and time.monotonic() - link._sent_at >= self.pulse_s:
                link.send(Kind.PULSE)

    def _lose(self, link: Link, reason: str, events: list[Event]) -> None:
        self.remove(link)
        events.append(Lost(link, reason))

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._wake_in, 4096)) == 4096:
                pass
