"""Faults on purpose, for tests: one environment variable, LOCKSTEP_FAULTS, holding JSON. Dead unless it is set.

{"flip": {"rank": 1, "step": 40, "field": "retractions"}}    one replica's number is changed before that step
{"slow": {"rank": 1, "seconds": 0.2}}                        each step of that rank takes longer
{"memory": {"rank": 1, "bytes": 1000000}}                    that rank believes to have so little for its pool
{"crash": {"rank": 1, "step": 40}}                           that rank's computing fails at that step or the next
{"load": {"rank": 1, "seconds": 30}}                         that rank's weights take longer to load
{"copy": {"rank": 1, "seconds": 0.02, "fail_every": 5}}      its copies between tiers take longer and fail at times
{"host_memory": {"total": 10000000000, "available": 9000000000}}    every machine seems to have so much memory
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

VARIABLE = "LOCKSTEP_FAULTS"


class Flip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change one field of one replica before it applies a step."""

    rank: int
    step: int
    field: Literal["retractions", "finished", "clock", "pages"]


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Make each step of a rank longer."""

    rank: int
    seconds: float


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let a rank believe in another budget for its device pool."""

    rank: int
    bytes: int


class Crash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let a rank's computing fail at a step, or at the first one after it that computes anything."""

    rank: int
    step: int


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Make the loading of a rank's weights longer, so that something can happen during the start."""

    rank: int
    seconds: float


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trouble with the copies between tiers of one rank, or of every rank (-1)."""

    rank: int
    seconds: float = 0.0
    """How much longer each page takes."""
    fail_every: int = 0
    """Every n-th transfer fails, with all its pages copied but the last; 0 for none."""
    damage_every: int = 0
    """Every n-th backup leaves a damaged page on the host; 0 for none."""


class MachineMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let every rank believe that its machine has this memory."""

    total: int
    available: int


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to go wrong."""

    flip: Flip | None = None
    slow: Slow | None = None
    memory: Memory | None = None
    crash: Crash | None = None
    load: Load | None = None
    copy: Copy | None = None
    host_memory: MachineMemory | None = None

    def copy_of(self, rank: int) -> Copy | None:
        """The trouble with copies that a rank is to have."""
        return self.copy if self.copy is not None and self.copy.rank in (rank, -1) else None


def read_faults() -> Faults:
    """The faults that the environment asks for; none when it says nothing. Raises ValueError for nonsense."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Faults()
    try:
        return msgspec.json.decode(text, type=Faults)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{VARIABLE} {text}: {error}") from None
