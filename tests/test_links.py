"""Links and the poller, over real sockets: order, last words, silence, floods, and foreign bytes."""

import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from engine.distributed.frames import BODY_BYTES_MAX, Kind, encode
from engine.distributed.links import Link, Lost, Poller, Received

PATIENCE_S = 20.0


def pair(**limits):
    ours, theirs = socket.socketpair()
    return Link(ours, "rank 0", **limits), Link(theirs, "rank 1", **limits)


@pytest.fixture
def pollers():
    made = []

    def make(*links, **limits):
        made.append(Poller(**limits))
        for link in links:
            made[-1].add(link)
        return made[-1]

    yield make
    for poller in made:
        poller.close()


def poll_until(poller, done):
    events = []
    deadline = time.monotonic() + PATIENCE_S
    while not done(events):
        assert time.monotonic() < deadline, f"after {PATIENCE_S} s only {events}"
        events += poller.poll(0.2)
    return events


def keep_polling(poller, stop):
    while not stop.is_set():
        poller.poll(0.05)


def test_frames_of_several_threads_arrive_whole_and_in_each_threads_order(pollers):
    # Bodies from empty to far beyond a socket's buffer, so that sends are cut anywhere.
    near, far = pair()
    receiver, sender = pollers(near), pollers(far)
    bodies = {
        thread: [
            random.Random(f"{thread} {place}").randbytes(size)
            for place, size in enumerate((0, 1, 70_000, 300, 2_000_000, 5))
        ]
        for thread in range(4)
    }

    def work(thread):
        for place, body in enumerate(bodies[thread]):
            half = len(body) // 2
            far.send(
                Kind.ENTRY, body[:half], memoryview(body)[half:], epoch=thread, step=place, digest=2**64 - 1
            )

    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(thread,)) for thread in bodies]
    threads.append(threading.Thread(target=keep_polling, args=(sender, stop)))
    for thread in threads:
        thread.start()
    events = poll_until(receiver, lambda events: len(events) == 24)
    stop.set()
    for thread in threads:
        thread.join()
    for thread, sent in bodies.items():
        frames = [event.frame for event in events if event.frame.epoch == thread]
        assert [frame.step for frame in frames] == list(range(6))
        assert [frame.body for frame in frames] == sent


def test_a_send_with_room_in_the_socket_needs_no_poller():
    near, far = pair()
    far.send(Kind.ENTRY, b"now", step=7)
    assert far.backlog_bytes == 0
    assert near._socket.recv(1000) == encode(Kind.ENTRY, b"now", step=7)
    near.close()
    far.close()


def test_a_peer_that_does_not_read_is_lost_when_the_backlog_is_full(pollers):
    # sglang#28916: lists of pending sends that grow without end.
    near, far = pair(backlog_bytes_max=3_000_000)
    sender = pollers(far)
    body = bytes(1_000_000)
    for _ in range(10):
        far.send(Kind.HIDDEN, body)  # returns, or the test hangs
    (lost,) = poll_until(sender, lambda events: events)
    assert isinstance(lost, Lost) and lost.link is far
    assert str(lost).startswith("rank 1 does not read: ") and far.backlog_bytes == 0
    far.send(Kind.HIDDEN, body)
    assert far.backlog_bytes == 0
    near.close()


def test_last_words_come_before_the_loss_and_the_loss_comes_once(pollers):
    near, far = pair()
    poller = pollers(near)
    far.send(Kind.REPORT, b"report")
    far.send(Kind.FATAL, b"why")
    far.close()
    near.send(Kind.ENTRY, b"into the void")  # the first to notice is the sender, who says nothing
    events = poll_until(poller, lambda events: any(isinstance(event, Lost) for event in events))
    assert [event.frame.body for event in events[:-1]] == [b"report", b"why"]
    assert events[-1].link is near and "is gone" in events[-1].reason
    near.send(Kind.ENTRY, b"still nothing")
    assert poller.poll(0) == []


def test_a_killed_peer_is_lost_at_once(pollers):
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(["sleep", "60"], pass_fds=[theirs.fileno()])
    theirs.close()
    poller = pollers(Link(ours, "rank 3"), silence_s=600)
    assert poller.poll(0) == []
    child.kill()
    child.wait()
    (lost,) = poll_until(poller, lambda events: events)
    assert str(lost) == "rank 3 is gone (end of file)"


PULSING_PEER = """
import socket, sys
from engine.distributed.links import Link, Poller
poller = Poller(pulse_s=0.05, silence_s=600)
poller.add(Link(socket.socket(fileno=int(sys.argv[1])), "parent"))
while True:
    poller.poll()
"""


def test_a_stopped_peer_is_lost_by_its_silence_and_an_idle_one_is_not(pollers):
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", PULSING_PEER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    try:
        link = Link(ours, "rank 2")
        poller = pollers(link, silence_s=600)
        poll_until(poller, lambda _: link._received_at > link._sent_at)  # its first pulse
        poller.silence_s = 0.6
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert poller.poll(0.1) == [], "an idle peer that pulses was lost"
        child.send_signal(signal.SIGSTOP)
        (lost,) = poll_until(poller, lambda events: events)
        assert str(lost) == "rank 2 was silent for 0.6 s"
    finally:
        child.kill()
        child.wait()


def test_our_own_pause_is_not_the_peers_silence(pollers):
    near, far = pair()
    stop = threading.Event()
    thread = threading.Thread(target=keep_polling, args=(pollers(far, pulse_s=0.05, silence_s=600), stop))
    thread.start()
    poller = pollers(near, silence_s=0.3)
    time.sleep(0.9)
    for _ in range(5):
        assert poller.poll(0.05) == []
    stop.set()
    thread.join()


def test_a_pause_of_the_whole_machine_is_nobodys_silence(pollers):
    near, far = pair()
    both = [pollers(near, silence_s=0.5), pollers(far, silence_s=0.5)]
    time.sleep(1.3)  # neither side polls, as when a container is frozen: no pulse was sent by anybody
    for _ in range(5):
        for poller in both:
            assert poller.poll(0.02) == []


def test_idle_means_blocked(pollers):
    # Two pulses a second and nothing else: a poller that spins would come back thousands of times.
    near, far = pair()
    poller = pollers(near, far, pulse_s=0.25)
    polls, until = 0, time.monotonic() + 1.0
    cpu_before = time.thread_time()
    while time.monotonic() < until:
        assert poller.poll(0.5) == []
        polls += 1
    assert polls < 40, f"{polls} polls in one idle second"
    assert time.thread_time() - cpu_before < 0.1


def test_a_link_without_heartbeats_may_be_silent(pollers):
    near, far = pair()
    poller = Poller(pulse_s=0.01, silence_s=0.05)
    poller.add(near, heartbeats=False)
    for _ in range(10):
        assert poller.poll(0.02) == []
    far._socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        far._socket.recv(1)  # nor was it pulsed
    far.close()
    (lost,) = poll_until(poller, lambda events: events)
    assert "end of file" in lost.reason
    poller.close()


def test_a_pulse_with_a_body_is_news_and_an_empty_one_is_not(pollers):
    near, far = pair()
    poller = pollers(near)
    far.send(Kind.PULSE)
    far.send(Kind.PULSE, b"busy")
    (event,) = poll_until(poller, lambda events: events)
    assert isinstance(event, Received) and event.frame.body == b"busy"
    far.close()


@pytest.mark.parametrize(
    "noise",
    [
        random.Random(1).randbytes(65536),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        encode(Kind.ENTRY, b"damaged")[:-1] + b"?" + bytes(40),
        encode(Kind.ENTRY, b"")[:8] + (BODY_BYTES_MAX + 1).to_bytes(4, "little") + bytes(40),
    ],
)
def test_nonsense_loses_that_link_and_disturbs_no_other(pollers, noise):
    (bad_near, bad_far), (good_near, good_far) = pair(), pair()
    poller = pollers(bad_near, good_near)
    bad_far._socket.send(noise)
    good_far.send(Kind.ENTRY, b"fine")
    events = poll_until(poller, lambda events: len(events) == 2)
    assert {type(event) for event in events} == {Lost, Received}
    (lost,) = (event for event in events if isinstance(event, Lost))
    assert lost.link is bad_near and "talks nonsense" in lost.reason
    good_far.send(Kind.ENTRY, b"still fine")
    (event,) = poll_until(poller, lambda events: events)
    assert event.frame.body == b"still fine"
    bad_far.close()
    good_far.close()


def test_a_wake_comes_through_and_never_blocks(pollers):
    poller = pollers()
    thread = threading.Timer(0.05, poller.wake)
    thread.start()
    assert poller.poll(PATIENCE_S) == []
    thread.join()
    for _ in range(100_000):
        poller.wake()  # never blocks, though nobody drains
    assert poller.poll(0) == []


def test_flush_sends_what_waits_or_says_that_it_could_not(pollers):
    near, far = pair()
    sender = pollers(far)
    far.send(Kind.FATAL, bytes(3_000_000))
    assert far.backlog_bytes > 0
    assert not sender.flush(0.05)
    receiver, stop, events = pollers(near), threading.Event(), []

    def receive():
        while not stop.is_set():
            events.extend(receiver.poll(0.05))

    thread = threading.Thread(target=receive)
    thread.start()
    assert sender.flush(PATIENCE_S) and far.backlog_bytes == 0
    stop.set()
    thread.join()
    events += receiver.poll(0)
    assert [len(event.frame.body) for event in events] == [3_000_000]


def test_a_removed_link_is_closed_without_an_event(pollers):
    near, far = pair()
    poller = pollers(near, far)
    poller.remove(near)
    (lost,) = poll_until(poller, lambda events: events)
    assert lost.link is far
