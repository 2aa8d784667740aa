"""The frame: how every message between our processes looks on a stream socket. No torch, no sockets, no pickle.

    magic 4 | version 1 | kind 1 | epoch 2 | body length 4 | step 8 | digest 8 | crc32 of all else 4 | body

All numbers are little-endian. A body is typed msgpack (see `engine.types`) or raw tensor bytes behind a fixed
head; a reader checks magic, version, kind and length before it makes room for a body. A stream that breaks these
rules raises FrameError: the peer is treated as gone, since nothing after a lost border can be trusted.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

HEADER = struct.Struct("<4sBBHIQQI")
UNSUMMED = struct.Struct("<4sBBHIQQ")
"""The header up to its checksum."""
MAGIC = b"LKST"
VERSION = 1
BODY_BYTES_MAX = 256 * 1024 * 1024
"""The largest body: 4,096 rows of a hidden state of 16,384 fp32 numbers."""
HELLO_BYTES_MAX = 4096
"""The largest body that is read from a peer that has not yet proved who it is."""
ROOM_BYTES_MIN = 64 * 1024
"""From how many missing bytes on a body is worth a read of its own, straight into its place."""


class FrameError(ConnectionError):
    """The bytes on a link are not frames of this protocol."""


class Kind(enum.IntEnum):
    """What a frame's body is."""

    HELLO = 1  # authentication, before anything else
    AGREE = 2  # start-up: msgpack of the agreement in progress
    ENTRY = 3  # leader -> rank: types.Entry; digest is the leader's after applying it
    REPORT = 4  # rank -> leader: types.Report
    STATUS = 5  # rank -> leader: types.StageStatus
    VECTOR = 6  # rank <-> leader: state vectors, once stages have parted
    HIDDEN = 7  # stage -> next stage: hidden states of one step
    PULSE = 8  # heartbeat, both ways; empty body between ranks
    MESSAGE = 9  # front end <-> leader: any other of types.*
    FATAL = 10  # the sender ends; types.Fatal


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it came off a link. The body belongs to whoever takes the frame and may be written to."""

    kind: Kind
    epoch: int
    step: int
    digest: int
    body: bytes | bytearray


def encode_header(
    kind: Kind, *buffers: bytes | bytearray | memoryview, epoch: int = 0, step: int = 0, digest: int = 0
) -> bytes:
    """The header of a frame whose body is `buffers` joined; they are read for the checksum, never copied.

    A body beyond the limit is a programmer's error here: callers bound what they send. Views are of single bytes.
    """
    length = sum(map(len, buffers))
    assert length <= BODY_BYTES_MAX, f"a body of {length} bytes; at most {BODY_BYTES_MAX} are allowed"
    unsummed = UNSUMMED.pack(MAGIC, VERSION, kind, epoch, length, step, digest)
    crc = zlib.crc32(unsummed)
    for buffer in buffers:
        crc = zlib.crc32(buffer, crc)
    return unsummed + crc.to_bytes(4, "little")


def encode(kind: Kind, body: bytes, *, epoch: int = 0, step: int = 0, digest: int = 0) -> bytes:
    """One whole frame as bytes; for small bodies, since it copies."""
    return encode_header(kind, body, epoch=epoch, step=step, digest=digest) + body


class Decoder:
    """Turns a stream of bytes into frames. Holds at most one unfinished frame, of at most `body_bytes_max` bytes.

    Bytes come in by `feed`, from any source; or, for a large body, `room` gives the place where its missing bytes
    belong, a socket writes them there itself, and `filled` says how many came.
    """

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._header = bytearray()
        self._body = bytearray()
        self._missing = 0
        """Bytes of the body still to come; meaningful only once the header is whole."""

    @property
    def wanted(self) -> int:
        """Bytes up to the end of the header or body in progress, so a reader can stop at a frame's border."""
        header_missing = HEADER.size - len(self._header)
        return header_missing or self._missing

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take bytes in, give whole frames out. Raises FrameError at the first byte that breaks the format.

        Nothing is read until the iterator is used up.
        """
        view = memoryview(data)
        while len(view):
            header_missing = HEADER.size - len(self._header)
            if header_missing:
                self._header += view[:header_missing]
                view = view[header_missing:]
                if len(self._header) < HEADER.size:
                    return
                self._open_body()
            taken = min(self._missing, len(view))
            if taken:
                start = len(self._body) - self._missing
                self._body[start : start + taken] = view[:taken]
                self._missing -= taken
                view = view[taken:]
            if not self._missing:
                yield self._close_body()

    def room(self) -> memoryview | None:
        """Where the missing bytes of a large unfinished body belong, or None when `feed` does as well."""
        if self._missing < ROOM_BYTES_MIN:
            return None
        return memoryview(self._body)[len(self._body) - self._missing :]

    def filled(self, count: int) -> Frame | None:
        """`count` bytes were written at the start of `room()`; the frame, if that was all of it."""
        assert 0 < count <= self._missing, f"{count} bytes written where {self._missing} were missing"
        self._missing -= count
        return None if self._missing else self._close_body()

    def _open_body(self) -> None:
        """Check the header just completed and make room for its body."""
        magic, version, kind, _, length, _, _, _ = HEADER.unpack(self._header)
        if magic != MAGIC or version != VERSION:
            raise FrameError(f"a frame begins with {magic!r} version {version}, not {MAGIC!r} {VERSION}")
        if not Kind.HELLO <= kind <= Kind.FATAL:
            raise FrameError(f"a frame has the unknown kind {kind}")
        if length > self._body_bytes_max:
            raise FrameError(f"a frame's body has {length} bytes; at most {self._body_bytes_max} are allowed")
        self._body = bytearray(length)
        self._missing = length

    def _close_body(self) -> Frame:
        """The finished frame; the decoder forgets it and waits for the next header."""
        _, _, kind, epoch, _, step, digest, crc = HEADER.unpack(self._header)
        body = self._body
        if zlib.crc32(body, zlib.crc32(self._header[: UNSUMMED.size])) != crc:
            raise FrameError(f"a frame of kind {kind}, step {step} arrived damaged")
        self._header = bytearray()
        self._body = bytearray()
        return Frame(Kind(kind), epoch, step, digest, body)
