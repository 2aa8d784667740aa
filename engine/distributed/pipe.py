"""The pipe: hidden states from stage to stage, over a link, checked before anything is computed with them.

    frame HIDDEN (step, digest)  |  head: dtype 16, rows 4, columns 4, zero 8  |  rows x columns numbers

The receiver compares step, digest, dtype and shape with its own plan and says by name what differs. The sender
never waits for the receiver. States travel through host memory; a device's own transport can take the place of
the body later without changing a signature here.
"""

from __future__ import annotations

import queue
import struct
from typing import Any

import torch

from engine.distributed.frames import Frame, Kind
from engine.distributed.links import Link

HEAD = struct.Struct("<16sII8x")
"""A multiple of 16 bytes, so that the numbers behind it are aligned."""
STEPS_MAX = 128
"""Most hidden states that wait here; the leader stops well before, at 64 steps of lag."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HiddenMismatch(RuntimeError):
    """What came is not what this stage's plan expects: the stages have parted."""

    def __init__(self, step: int, field: str, expected: object, received: object) -> None:
        """`step` is the receiver's; `field` one of step, digest, dtype, rows, columns, bytes."""
        super().__init__(
            f"hidden states for step {step}: {field} differs, expected {expected}, received {received}"
        )
        self.step = step
        self.field = field
        self.expected = expected
        self.received = received


class PipeClosed(ConnectionError):
    """Nothing more will come. The text is one line that says why."""


def send(link: Link, step: int, digest: int, hidden: torch.Tensor) -> None:
    """Send hidden states [rows, columns] of one step onward. Never blocks.

    On the CPU the numbers are not copied: the tensor must not be written to afterwards.
    """
    rows, columns = hidden.shape
    name = str(hidden.dtype).removeprefix("torch.")
    assert DTYPES.get(name) is hidden.dtype, f"hidden states of {hidden.dtype}; known are {', '.join(DTYPES)}"
    plain: Any = hidden.detach().to("cpu").contiguous().view(torch.uint8).flatten().numpy()
    head = HEAD.pack(name.encode(), rows, columns)
    link.send(Kind.HIDDEN, head, memoryview(plain), step=step, digest=digest)


class HiddenIn:
    """Hidden states that have arrived and not been taken, in the order of the log.

    The control thread calls `put` and `fail`, the compute thread `take`.
    """

    def __init__(self, device: torch.device | str = "cpu", *, steps_max: int = STEPS_MAX) -> None:
        """`device` is where `take` leaves the tensor."""
        self._device = torch.device(device)
        self._steps_max = steps_max
        self._frames: queue.SimpleQueue[Frame | str] = queue.SimpleQueue()

    def put(self, frame: Frame) -> None:
        """Take in a HIDDEN frame. Raises PipeClosed when more wait than the leader's pacing can explain."""
        if self._frames.qsize() >= self._steps_max:
            raise PipeClosed(
                f"more than {self._steps_max} hidden states wait; the previous stage has run away"
            )
        self._frames.put(frame)

    def fail(self, reason: str) -> None:
        """Nothing more will come: a `take` that waits, or the next one, raises PipeClosed with this reason."""
        self._frames.put(reason)

    def take(
        self,
        step: int,
        digest: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """The hidden states of `step`, [rows, columns] = `shape`, once they are here.

        Raises HiddenMismatch naming the first field that differs from what was expected, PipeClosed when the
        pipe was closed, TimeoutError after `timeout_s`.
        """
        try:
            frame = self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"hidden states for step {step} did not come within {timeout_s:g} s") from None
        if isinstance(frame, str):
            self._frames.put(frame)
            raise PipeClosed(frame)
        body = memoryview(frame.body)
        if len(body) < HEAD.size:
            raise HiddenMismatch(step, "bytes", f"at least {HEAD.size}", len(body))
        packed_name, rows, columns = HEAD.unpack_from(body)
        name = packed_name.rstrip(b"\0").decode("ascii", errors="replace")
        expected_bytes = HEAD.size + shape[0] * shape[1] * dtype.itemsize
        for field, expected, received in (
            ("step", step, frame.step),
            ("digest", f"{digest:016x}", f"{frame.digest:016x}"),
            ("dtype", str(dtype).removeprefix("torch."), name),
            ("rows", shape[0], rows),
            ("columns", shape[1], columns),
            ("bytes", expected_bytes, len(body)),
        ):
            if expected != received:
                raise HiddenMismatch(step, field, expected, received)
        hidden = torch.frombuffer(frame.body, dtype=torch.uint8)[HEAD.size :].view(dtype)
        return hidden.view(rows, columns).to(self._device)
