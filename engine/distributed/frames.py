"""The frame: how every message between our processes looks on a stream socket. No torch, no sockets, no pickle.

    magic 4 | version 1 | kind 1 | epoch 2 | body length 4 | crc32 of the body 4 | step 8 | digest 8 | body

All numbers are little-endian. A body is typed msgpack (see `engine.types`) or raw tensor bytes behind a msgpack
head; a reader checks magic, version, kind and length before it makes room for a body. A stream that breaks these
rules raises FrameError: the peer is treated as gone, since nothing after a lost border can be trusted.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

HEADER = struct.Struct("<4sBBHIIQQ")
MAGIC = b"LKST"
VERSION = 1
BODY_BYTES_MAX = 256 * 1024 * 1024
"""The largest body: 4,096 rows of a hidden state of 16,384 fp32 numbers."""


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
    """One message as it came off a link."""

    kind: Kind
    epoch: int
    step: int
    digest: int
    body: bytes


def encode(kind: Kind, body: bytes, *, epoch: int = 0, step: int = 0, digest: int = 0) -> bytes:
    """One frame as bytes. A body beyond the limit is a programmer's error here: callers bound what they send."""
    assert len(body) <= BODY_BYTES_MAX, f"a body of {len(body)} bytes; at most {BODY_BYTES_MAX} are allowed"
    header = HEADER.pack(MAGIC, VERSION, kind, epoch, len(body), zlib.crc32(body), step, digest)
    return header + body


class Decoder:
    """Turns a stream of bytes into frames. Holds at most one unfinished frame."""

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Take bytes in, give whole frames out. Raises FrameError at the first byte that breaks the format."""
        self._buffer += data
        offset = 0
        try:
            while len(self._buffer) - offset >= HEADER.size:
                magic, version, kind, epoch, length, crc, step, digest = HEADER.unpack_from(
                    self._buffer, offset
                )
                if magic != MAGIC or version != VERSION:
                    raise FrameError(
                        f"a frame begins with {magic!r} version {version}, not {MAGIC!r} {VERSION}"
                    )
                if length > self._body_bytes_max:
                    raise FrameError(
                        f"a frame's body has {length} bytes; at most {self._body_bytes_max} are allowed"
                    )
                end = offset + HEADER.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[offset + HEADER.size : end])
                offset = end
                if zlib.crc32(body) != crc:
                    raise FrameError(f"a frame of kind {kind}, step {step} arrived damaged")
                try:
                    known = Kind(kind)
                except ValueError:
                    raise FrameError(f"a frame has the unknown kind {kind}") from None
                yield Frame(known, epoch, step, digest, body)
        finally:
            del self._buffer[:offset]
