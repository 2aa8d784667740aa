"""Hidden states over a link: right on arrival, or refused by the name of what differs before anything computes."""

import contextlib
import socket
import threading

import pytest
import torch

from engine.distributed import pipe
from engine.distributed.frames import Frame, Kind
from engine.distributed.links import Link, Poller
from engine.distributed.pipe import HiddenIn, HiddenMismatch, PipeClosed


def carry(step, digest, hidden, inbox):
    """Send a tensor over a real socket into `inbox`."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(Poller()) as near, contextlib.closing(Poller()) as far:
        receiver, sender = Link(ours, "rank 0"), Link(theirs, "rank 1")
        near.add(receiver)
        far.add(sender)
        pipe.send(sender, step, digest, hidden)
        events = []
        while not events:
            far.poll(0)
            events = near.poll(0.01)
        assert events[0].frame.kind is Kind.HIDDEN
        inbox.put(events[0].frame)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 576), (512, 576), (0, 8)])
def test_numbers_arrive_bit_for_bit(dtype, shape):
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    inbox = HiddenIn()
    carry(7, 2**64 - 1, hidden, inbox)
    taken = inbox.take(7, 2**64 - 1, shape, dtype, 5)
    assert taken.dtype is dtype and tuple(taken.shape) == shape
    assert torch.equal(taken.view(torch.uint8), hidden.view(torch.uint8))
    taken += 1  # the receiver may write to it


def test_nan_and_a_tensor_that_is_not_contiguous_arrive():
    hidden = torch.tensor([[1.0, float("nan")], [float("inf"), -0.0]]).t()
    inbox = HiddenIn()
    carry(1, 0, hidden, inbox)
    taken = inbox.take(1, 0, (2, 2), torch.float32, 5)
    assert torch.equal(taken.view(torch.int32), hidden.contiguous().view(torch.int32))


class Tape:
    """A link that keeps what is sent."""

    def __init__(self):
        self.body = b""

    def send(self, kind, *buffers, step, digest):
        self.frame = Frame(kind, 0, step, digest, bytearray(b"".join(buffers)))
        self.buffers = buffers


@pytest.mark.parametrize(
    ("expected", "field", "values"),
    [
        ((8, 5, (2, 4), torch.float32), "step", (8, 7)),
        ((7, 6, (2, 4), torch.float32), "digest", ("0000000000000006", "0000000000000005")),
        ((7, 5, (2, 4), torch.bfloat16), "dtype", ("bfloat16", "float32")),
        ((7, 5, (3, 4), torch.float32), "rows", (3, 2)),
        ((7, 5, (2, 5), torch.float32), "columns", (5, 4)),
        ((8, 6, (3, 5), torch.bfloat16), "step", (8, 7)),
    ],
)
def test_what_the_plan_does_not_expect_is_named(expected, field, values):
    # sglang#29258: a batch was paired with another micro-batch's hidden state, and died in a kernel.
    tape, inbox = Tape(), HiddenIn()
    pipe.send(tape, 7, 5, torch.zeros(2, 4))
    inbox.put(tape.frame)
    with pytest.raises(HiddenMismatch) as raised:
        inbox.take(*expected, 1)
    assert raised.value.field == field
    assert (raised.value.expected, raised.value.received) == values
    assert raised.value.step == expected[0]
    assert f"{field} differs, expected {values[0]}, received {values[1]}" in str(raised.value)


@pytest.mark.parametrize("cut", [0, 31, 40, 63])
def test_a_body_that_is_too_short_or_long_is_named(cut):
    tape, inbox = Tape(), HiddenIn()
    pipe.send(tape, 7, 5, torch.zeros(2, 4))
    inbox.put(Frame(Kind.HIDDEN, 0, 7, 5, tape.frame.body[:cut]))
    with pytest.raises(HiddenMismatch, match="bytes differs"):
        inbox.take(7, 5, (2, 4), torch.float32, 1)
    inbox.put(Frame(Kind.HIDDEN, 0, 7, 5, tape.frame.body + b"x"))
    with pytest.raises(HiddenMismatch, match="bytes differs"):
        inbox.take(7, 5, (2, 4), torch.float32, 1)


def test_cpu_numbers_are_not_copied_on_the_way_out():
    tape, hidden = Tape(), torch.zeros(4, 8)
    pipe.send(tape, 1, 0, hidden)
    hidden[0, 0] = 1.0
    assert bytes(tape.buffers[1][:4]) == torch.tensor(1.0).numpy().tobytes()


def test_a_dtype_that_cannot_travel_is_a_programmers_error():
    with pytest.raises(AssertionError, match="float64"):
        pipe.send(Tape(), 1, 0, torch.zeros(1, 1, dtype=torch.float64))


def test_steps_come_in_log_order_and_a_waiting_taker_is_woken():
    inbox, taken = HiddenIn(), []

    def work():
        for step in (3, 4, 9):
            taken.append(inbox.take(step, step, (1, 2), torch.float32, 10)[0, 0].item())
        with pytest.raises(PipeClosed, match="rank 0 is gone"):
            inbox.take(10, 0, (1, 2), torch.float32, 10)
        with pytest.raises(PipeClosed, match="rank 0 is gone"):
            inbox.take(11, 0, (1, 2), torch.float32, 10)
        taken.append("closed")

    thread = threading.Thread(target=work)
    thread.start()
    for step in (3, 4, 9):
        tape = Tape()
        pipe.send(tape, step, step, torch.full((1, 2), float(step)))
        inbox.put(tape.frame)
    inbox.fail("rank 0 is gone")
    thread.join(10)
    assert taken == [3.0, 4.0, 9.0, "closed"]


def test_what_waits_is_bounded():
    # sglang#28916: lists of hidden states that grow without end.
    inbox = HiddenIn(steps_max=2)
    tape = Tape()
    pipe.send(tape, 1, 0, torch.zeros(1, 1))
    inbox.put(tape.frame)
    inbox.put(tape.frame)
    with pytest.raises(PipeClosed, match="more than 2 hidden states wait"):
        inbox.put(tape.frame)


def test_a_wait_has_an_end():
    with pytest.raises(TimeoutError, match=r"hidden states for step 5 did not come within 0.01 s"):
        HiddenIn().take(5, 0, (1, 1), torch.float32, 0.01)
