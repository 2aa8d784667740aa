"""What replicas compare: one hash a step, over the hash before it, all counters and all events of the step.

A difference between two replicas never heals here, since each digest covers the one before it. *What* parted is named
by the state behind the digest (`state_vector.py`), which is looked at only when digests differ.
"""

from __future__ import annotations

import hashlib
import struct
from array import array


class Accumulator:
    """What happened to one part of the state in one step, as numbers."""

    __slots__ = ("noted",)

    def __init__(self) -> None:
        self.noted: list[int] = []

    def note(self, *numbers: int) -> None:
        """Add one event, given as signed 64-bit numbers: its kind first, and a length before what varies."""
        self.noted += numbers

    def take(self) -> list[int]:
        """All that was noted since the last call."""
        noted, self.noted = self.noted, []
        return noted


def hash64(data: bytes) -> int:
    """64 bits of BLAKE2b; the same in every process, unlike the built-in hash."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash_events(noted: list[int]) -> int:
    """64 bits for the events of one part of the state in one step."""
    return hash64(array("q", noted).tobytes())


def fold_digest(previous: int, counters: tuple[int, ...], events: tuple[list[int], ...]) -> int:
    """The digest of a step: of the one before it, the counters (unsigned 64-bit numbers) and the step's events."""
    noted = [len(part) for part in events]
    for part in events:
        noted += part
    layout = f"<{len(counters) + 1}Q{len(noted)}q"
    return hash64(struct.pack(layout, previous, *counters, *noted))


def random_bits(seed: int, position: int) -> int:
    """The one random number of the token at `position`: 64 bits that depend on seed and position alone."""
    return hash64(array("Q", (seed & 0xFFFF_FFFF_FFFF_FFFF, position)).tobytes())


def show(digest: int) -> str:
    """A digest as people see it: 16 hexadecimal digits."""
    return f"{digest:016x}"
