"""Faults on purpose, for tests: one environment variable, LOCKSTEP_FAULTS, holding JSON. Dead unless it is set.

{"flip": {"rank": 1, "step": 40, "field": "retractions"}}    one replica's number is changed before that step
{"slow": {"rank": 1, "seconds": 0.2}}                        each step of that rank takes longer
{"memory": {"rank": 1, "bytes": 1000000}}                    that rank believes to have so little for its pool
{"crash": {"rank": 1, "step": 40}}                           that rank's computing fails at that step or the next
{"load": {"rank": 1, "seconds": 30}}                         that rank's weights take longer to load
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


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to go wrong."""

    flip: Flip | None = None
    slow: Slow | None = None
    memory: Memory | None = None
    crash: Crash | None = None
    load: Load | None = None


def read_faults() -> Faults:
    """The faults that the environment asks for; none when it says nothing. Raises ValueError for nonsense."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Faults()
    try:
        return msgspec.json.decode(text, type=Faults)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{VARIABLE} {text}: {error}") from None
