"""The conversation by which all ranks agree at the start, over the log links: a star with the leader in its middle.

One primitive, `gather`: every rank brings a value, every rank leaves with the same list. What follows from the
list is computed by each rank for itself, so all come to the same verdict, with the same words. The control thread
feeds what comes in (`put`, `lost`); the thread that starts the rank waits in `gather`. Nothing here decides what
is to be agreed, reads a clock for anything but its time limit, or imports torch. A world of one does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from engine.distributed.frames import Frame, Kind

TIMEOUT_S = 50.0
"""How long the leader waits for all values of a phase."""
GRACE_S = 5.0
"""How much longer the others wait, so that the leader's verdict, which names somebody, comes first."""


class Refused(Exception):
    """The ranks do not agree, or one of them cannot start. The text is one line, the same on every rank."""


class RankLost(ConnectionError):
    """A rank vanished or kept silent during the start. The text is one line that names it."""


class Speaker(Protocol):
    """What is needed of a `links.Link` here."""

    def send(self, kind: Kind, *buffers: bytes, epoch: int = 0) -> None:
        """Send a frame."""


class Part(msgspec.Struct, frozen=True, tag=True):
    """A rank's value in one phase. Phases are numbered, so that no two are ever mixed up."""

    number: int
    phase: str
    value: Any


class Whole(msgspec.Struct, frozen=True, tag=True):
    """The leader's answer: all values in rank order."""

    number: int
    values: list[Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The leader's answer when there is none."""

    lost: bool
    line: str


class Agreement:
    """One rank's part in the conversation. Every rank calls the same methods with the same phases in the same order."""

    def __init__(
        self, rank: int, world_size: int, log_links: Mapping[int, Speaker], *, epoch: int = 0
    ) -> None:
        """`log_links` by the peer's rank, as in `rendezvous.RankLinks.log`."""
        self._rank = rank
        self._world_size = world_size
        self._links = dict(log_links)
        self._epoch = epoch
        self._number = 0
        # The condition guards what the control thread leaves here for the waiting one.
        self._news = threading.Condition()
        self._parts: dict[int, Part] = {}
        self._whole: Whole | None = None
        self._failure: Failed | None = None

    def gather(self, phase: str, value: Any, *, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Every rank's value, in rank order, equal on every rank. Values are what msgpack carries (tuples come back
        as lists).

        Raises RankLost or Refused, on every rank that still lives, when a rank vanishes, is `timeout_s` late, or
        stands in another phase. After long local work (weights) the limit must be longer than the work may differ.
        """
        if self._world_size == 1:
            return [value]
        self._number += 1
        part = Part(self._number, phase, msgspec.msgpack.decode(msgspec.msgpack.encode(value)))
        if self._rank == 0:
            return self._gather_as_leader(part, timeout_s)
        self._links[0].send(Kind.AGREE, msgspec.msgpack.encode(part), epoch=self._epoch)
        with self._news:
            answered = self._news.wait_for(
                lambda: self._whole is not None or self._failure is not None, timeout_s + GRACE_S
            )
            if not answered:
                self._failure = Failed(
                    True, f"rank 0 did not answer in {phase!r} within {timeout_s + GRACE_S:g} s"
                )
            self._raise_failure()
            whole, self._whole = self._whole, None
        assert whole is not None and whole.number == self._number, f"answer {whole} to phase {self._number}"
        return whole.values

    def must_equal(self, phase: str, fields: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> None:
        """Raise Refused naming the first field, in rank 0's order, that is not the same on every rank."""
        line = first_difference(self.gather(phase, dict(fields), timeout_s=timeout_s))
        if line is not None:
            raise Refused(line)

    def minimum(self, phase: str, value: int, *, timeout_s: float = TIMEOUT_S) -> int:
        """The smallest value of all ranks; at most 64 bits."""
        return int(min(self.gather(phase, value, timeout_s=timeout_s)))

    def vote(self, phase: str, problem: str | None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Go on together or not at all: raises Refused with the problem of the first rank that has one."""
        for rank, told in enumerate(self.gather(phase, problem, timeout_s=timeout_s)):
            if told is not None:
                raise Refused(f"rank {rank}: {told}" if self._world_size > 1 else told)

    def put(self, link: Speaker, frame: Frame) -> None:
        """Take an AGREE frame from a log link. Called by the control thread; never blocks."""
        rank = self._rank_of(link)
        try:
            said = msgspec.msgpack.decode(frame.body, type=Part | Whole | Failed)
        except msgspec.MsgspecError as error:
            self._fail(Failed(True, f"rank {rank} talks nonsense during the start: {error}"))
            return
        with self._news:
            if isinstance(said, Part):
                self._parts[rank] = said
            elif isinstance(said, Whole):
                self._whole = said
            elif self._failure is None:
                self._failure = said
            self._news.notify_all()

    def lost(self, link: Speaker, reason: str) -> None:
        """A log link is gone. On the leader all other ranks hear of it at once. Called by the control thread."""
        self._fail(Failed(True, f"rank {self._rank_of(link)} {reason} during the start"))

    def _gather_as_leader(self, own: Part, timeout_s: float) -> list[Any]:
        others = sorted(self._links)
        deadline = time.monotonic() + timeout_s
        with self._news:
            while self._failure is None and len(self._parts) < len(others):
                if not self._news.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                    break
            parts, self._parts = self._parts, {}
        late = [rank for rank in others if rank not in parts]
        astray = [rank for rank in others if rank in parts and parts[rank].phase != own.phase]
        if astray:
            first = parts[astray[0]]
            self._fail(
                Failed(False, f"rank 0 starts with {own.phase!r}, rank {astray[0]} with {first.phase!r}")
            )
        elif late:
            names = ", ".join(f"rank {rank}" for rank in late)
            self._fail(Failed(True, f"{names} did not take part in {own.phase!r} within {timeout_s:g} s"))
        self._raise_failure()
        values = [own.value, *(parts[rank].value for rank in others)]
        body = msgspec.msgpack.encode(Whole(own.number, values))
        for rank in others:
            self._links[rank].send(Kind.AGREE, body, epoch=self._epoch)
        return values

    def _fail(self, failure: Failed) -> None:
        """Remember the first failure, wake whoever waits, and on the leader tell all others."""
        with self._news:
            if self._failure is not None:
                return
            self._failure = failure
            self._news.notify_all()
        if self._rank == 0:
            for link in self._links.values():
                link.send(Kind.AGREE, msgspec.msgpack.encode(failure), epoch=self._epoch)

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            raise RankLost(failure.line) if failure.lost else Refused(failure.line)

    def _rank_of(self, link: Speaker) -> int:
        ranks = [rank for rank, known in self._links.items() if known is link]
        assert ranks, f"{link} is no log link of rank {self._rank}"
        return ranks[0]


def first_difference(tables: list[dict[str, Any]]) -> str | None:
    """One line for the first field whose value is not the same in every rank's table, or None if all are equal.

    Names the field, then each value with the ranks that have it: `page_size differs: 16 on rank 0, 32 on ranks 1, 2`.
    """
    names = list(dict.fromkeys(name for table in tables for name in table))
    for name in names:
        groups: list[tuple[Any, list[int]]] = []
        for rank, table in enumerate(tables):
            value = table.get(name, "absent")
            for known, ranks in groups:
                if known == value:
                    ranks.append(rank)
                    break
            else:
                groups.append((value, [rank]))
        if len(groups) > 1:
            return f"{name} differs: " + ", ".join(
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                for value, ranks in groups
            )
    return None
