"""What replicas compare: chained hashes of events and a vector of counters, folded once a step.

A difference between two replicas never heals here: each digest covers the one before it. The vector beside it
names the first field that differs, so that a report can say *what* parted and not only *that* it did.
"""

from __future__ import annotations

import hashlib
from array import array


class Accumulator:
    """A chained 64-bit hash over every event noted so far."""

    __slots__ = ("_noted", "value")

    def __init__(self) -> None:
        self.value = 0
        self._noted: list[int] = []

    def note(self, *numbers: int) -> None:
        """Add one event, given as signed 64-bit numbers: its kind first, and a length before what varies."""
        self._noted += numbers

    def fold(self) -> int:
        """Hash what was noted since the last fold into the chain and return the chain's value."""
        if self._noted:
            packed = array("q", self._noted).tobytes()
            self.value = hash64(self.value.to_bytes(8, "little") + packed)
            self._noted = []
        return self.value


def hash64(data: bytes) -> int:
    """64 bits of BLAKE2b; the same in every process, unlike the built-in hash."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def fold_digest(previous: int, vector: tuple[int, ...]) -> int:
    """The digest of a step from the digest before it and the step's state vector (unsigned 64-bit numbers)."""
    return hash64(array("Q", (previous, *vector)).tobytes())


def random_bits(seed: int, position: int) -> int:
    """The one random number of the token at `position`: 64 bits that depend on seed and position alone."""
    return hash64(array("Q", (seed & 0xFFFF_FFFF_FFFF_FFFF, position)).tobytes())


def show(digest: int) -> str:
    """A digest as people see it: 16 hexadecimal digits."""
    return f"{digest:016x}"
