"""Frames: what goes in comes out whatever way the stream is cut, and foreign bytes do no harm."""

import os
import random
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distributed.frames import (
    BODY_BYTES_MAX,
    HEADER,
    ROOM_BYTES_MIN,
    UNSUMMED,
    Decoder,
    Frame,
    FrameError,
    Kind,
    encode,
    encode_header,
)

frames = st.builds(
    Frame,
    st.sampled_from(Kind),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=200),
)


def as_bytes(frame):
    return encode(frame.kind, frame.body, epoch=frame.epoch, step=frame.step, digest=frame.digest)


def test_header_layout_is_the_documented_one():
    data = encode(Kind.ENTRY, b"abc", epoch=2, step=3, digest=4)
    assert HEADER.size == 32 and UNSUMMED.size == 28
    assert data[:4] == b"LKST" and data[4] == 1 and data[5] == 3
    assert data[6:8] == (2).to_bytes(2, "little") and data[8:12] == (3).to_bytes(4, "little")
    assert data[12:20] == (3).to_bytes(8, "little") and data[20:28] == (4).to_bytes(8, "little")
    assert data[32:] == b"abc"


@given(st.lists(frames, max_size=8), st.integers(0, 2**32))
def test_any_cut_of_the_stream_gives_the_same_frames(sent, seed):
    stream = b"".join(map(as_bytes, sent))
    choose = random.Random(seed)
    decoder, received, at = Decoder(), [], 0
    while at < len(stream):
        size = choose.choice((1, 3, 31, 32, 33, 100))
        received += decoder.feed(stream[at : at + size])
        at += size
    assert received == sent


@given(st.integers(1, 4))
def test_a_reader_that_reads_what_is_wanted_stops_at_each_border(count):
    stream = as_bytes(Frame(Kind.HELLO, 0, 1, 2, b"x" * 50)) * count
    decoder, borders, at = Decoder(), [], 0
    while at < len(stream):
        wanted = decoder.wanted
        assert list(decoder.feed(stream[at : at + wanted])) or at + wanted < len(stream)
        at += wanted
        borders.append(at)
    assert borders == [place * 82 + part for place in range(count) for part in (32, 82)]


def test_a_body_in_several_buffers_is_one_body():
    parts = [b"head", bytearray(b"middle"), memoryview(b"tail")]
    data = encode_header(Kind.HIDDEN, *parts, step=5) + b"".join(parts)
    assert [frame.body for frame in Decoder().feed(data)] == [b"headmiddletail"]


def test_a_large_body_is_written_straight_into_its_place():
    body = random.Random(1).randbytes(4 * 1024 * 1024)
    data = memoryview(encode(Kind.HIDDEN, body, step=9))
    decoder = Decoder()
    tracemalloc.start()
    assert list(decoder.feed(data[: HEADER.size + 5])) == []
    at, frame = HEADER.size + 5, None
    while frame is None:
        room = decoder.room()
        if room is None:
            (frame,) = decoder.feed(data[at:])
            break
        count = min(len(room), 700_000)
        room[:count] = data[at : at + count]
        at += count
        frame = decoder.filled(count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert frame.body == body and frame.step == 9
    assert peak < len(body) + 100_000, f"{peak} bytes at once for a body of {len(body)}"


@settings(max_examples=300)
@given(st.binary(max_size=2000), st.booleans())
def test_random_bytes_give_a_frame_error_or_nothing(noise, after_a_good_header):
    decoder = Decoder(body_bytes_max=4096)
    prefix = encode(Kind.ENTRY, b"", step=1)[: random.Random(len(noise)).randrange(33)]
    try:
        received = list(decoder.feed((prefix if after_a_good_header else b"") + noise))
    except FrameError:
        return
    assert all(frame.kind is Kind.ENTRY and frame.body == b"" for frame in received)


@given(frames, st.data())
def test_no_flipped_bit_passes(frame, data):
    stream = bytearray(as_bytes(frame))
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    try:
        received = list(Decoder().feed(stream))
    except FrameError:
        return
    assert received == []  # a longer body is awaited


@pytest.mark.parametrize(
    "header",
    [
        UNSUMMED.pack(b"HTTP", 1, 3, 0, 0, 0, 0),
        UNSUMMED.pack(b"LKST", 2, 3, 0, 0, 0, 0),
        UNSUMMED.pack(b"LKST", 1, 0, 0, 0, 0, 0),
        UNSUMMED.pack(b"LKST", 1, 11, 0, 0, 0, 0),
        UNSUMMED.pack(b"LKST", 1, 3, 0, BODY_BYTES_MAX + 1, 0, 0),
        UNSUMMED.pack(b"LKST", 1, 3, 0, 2**32 - 1, 0, 0),
    ],
)
def test_a_wrong_header_is_refused_before_room_is_made(header):
    decoder = Decoder()
    tracemalloc.start()
    with pytest.raises(FrameError):
        list(decoder.feed(header + bytes(4)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_small_bodies_need_no_room_of_their_own():
    decoder = Decoder()
    data = encode(Kind.ENTRY, bytes(ROOM_BYTES_MIN - 1))
    list(decoder.feed(data[: HEADER.size]))
    assert decoder.room() is None


def test_a_body_beyond_the_limit_is_a_programmers_error():
    with pytest.raises(AssertionError, match=str(BODY_BYTES_MAX)):
        encode_header(Kind.HIDDEN, memoryview(bytes(1)), *[memoryview(bytes(BODY_BYTES_MAX // 4))] * 4)


def test_frames_need_no_torch():
    modules = ["frames", "handshake", "links", "run_folder", "rendezvous", "agreement", "memory", "launch"]
    program = "import sys\n" + "".join(f"import engine.distributed.{name}\n" for name in modules)
    program += "assert 'torch' not in sys.modules and 'pickle' not in dir(sys.modules['engine'])"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=dict(os.environ))
