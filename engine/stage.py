"""Every rank: entry -> plan -> work -> report. The control thread and the loop that all ranks run.

A `Stage` owns this rank's replica of the scheduler, its compute thread and its links, and watches them with one
poller. What differs between the leader and the others is a `Role`: `Follower` here, `Leader` in `leader.py`. A
follower compares the digest of each entry with its own before anything of it is computed; at the first difference
it stops and sends its state vector, and the leader says what parted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.config import EngineConfig
from engine.distributed.agreement import Agreement, RankLost, Refused
from engine.distributed.frames import Frame, Kind
from engine.distributed.launch import ExitCode
from engine.distributed.links import Link, Lost, Poller, Received
from engine.distributed.pipe import HiddenMismatch, PipeClosed
from engine.distributed.rendezvous import RankLinks
from engine.faults import Faults
from engine.scheduler.digest import show
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.state_vector import counters
from engine.startup import Started
from engine.topology import Topology
from engine.types import Control, Entry, Fatal, FinishedStep, Plan, Report, StageStatus, TransferResult
from engine.worker import Copied, Done, Failed, Worker

SILENCE_S = 2.0
"""A rank from which nothing, not even a heartbeat, came for so long is gone."""
START_SILENCE_S = 30.0
"""The same while weights load: imports and page faults may hold a process up."""
WATERMARK_STEPS = 16
"""A rank without other news reports how far it is after so many steps; the leader waits at 64."""

log = logging.getLogger(__name__)


class Parted(msgspec.Struct, frozen=True):
    """A replica's last words: where it stands at the step whose digest differs."""

    rank: int
    step: int
    digest: int
    vector: tuple[int, ...]


class Role(Protocol):
    """What the leader and the others do differently."""

    def started(self, started: Started) -> None:
        """The rank can serve."""

    def receive(self, link: Link, frame: Frame) -> None:
        """A frame that is not for every rank alike came in."""

    def lost(self, link: Link, reason: str) -> None:
        """A link is gone."""

    def report(self, report: Report) -> None:
        """This rank has news of its own."""

    def failed(self, code: int, message: str) -> None:
        """This rank cannot go on."""

    def turn(self) -> float | None:
        """Called after all that happened was dealt with. Returns seconds until it must be called again, if any."""


class Stage:
    """One rank's control thread."""

    def __init__(
        self, config: EngineConfig, topology: Topology, links: RankLinks, agreement: Agreement, faults: Faults
    ) -> None:
        self.config = config
        self.topology = topology
        self.links = links
        self.poller = Poller(silence_s=START_SILENCE_S)
        for link in links.all:
            self.poller.add(link)
        self.worker = Worker(topology, links.next, faults, self.poller.wake)
        self.scheduler: Scheduler | None = None
        self.started: Started | None = None
        self.exit_code: int | None = None
        self._agreement = agreement
        self._faults = faults
        self._finished_step = 0
        self._queued_step = 0
        self._reported_step = 0

    # ---- the loop ----

    def run(self, role: Role, bring_up: Callable[[], Started]) -> int:
        """Live until the end; returns the exit code."""
        self.worker.start(bring_up)
        timeout = role.turn()
        while self.exit_code is None:
            self._take_events(role, timeout)
            self._take_news(role)
            if self.exit_code is None:
                timeout = role.turn()
        return self.exit_code

    def end(self, code: int) -> None:
        """Leave the loop."""
        if self.exit_code is None:
            self.exit_code = code

    def _take_events(self, role: Role, timeout: float | None) -> None:
        for event in self.poller.poll(timeout):
            if self.exit_code is None:
                if isinstance(event, Received):
                    self._receive(role, event.link, event.frame)
                elif isinstance(event, Lost):
                    self._lose(role, event)

    def _receive(self, role: Role, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.HIDDEN and link is self.links.previous:
            try:
                self.worker.hidden_in.put(frame)
            except PipeClosed as error:
                role.failed(ExitCode.RANK_LOST, str(error))
        elif frame.kind is Kind.AGREE and link in self.links.log.values():
            self._agreement.put(link, frame)
        else:
            role.receive(link, frame)

    def _lose(self, role: Role, event: Lost) -> None:
        if event.link in self.links.log.values() and self.started is None:
            self._agreement.lost(event.link, event.reason)
        if event.link is self.links.previous:
            self.worker.hidden_in.fail(str(event))
        role.lost(event.link, event.reason)

    def _take_news(self, role: Role) -> None:
        finished: list[FinishedStep] = []
        copied: list[TransferResult] = []
        if self.exit_code is not None:
            return
        for news in self.worker.news():
            if isinstance(news, Started):
                self.started = news
                self.poller.silence_s = SILENCE_S
                self.scheduler = Scheduler(
                    news.capacity,
                    schedule_policy=self.config.schedule_policy,
                    cache_prefixes=not self.config.disable_radix_cache,
                    host_counts=not self.config.debug_unagreed_hicache,
                )
                role.started(news)
            elif isinstance(news, Done):
                self._finished_step = news.step
                if news.finished is not None:
                    finished.append(news.finished)
            elif isinstance(news, Copied):
                copied.append(news.result)
            elif isinstance(news, Failed):
                self._fail(role, news.error)
        if self.scheduler is None:
            return
        watermark = self.watermark
        if finished or copied or watermark - self._reported_step >= WATERMARK_STEPS:
            self._reported_step = watermark
            role.report(
                Report(
                    rank=self.topology.rank,
                    watermark=watermark,
                    finished=tuple(finished),
                    transfers=tuple(copied),
                )
            )

    def _fail(self, role: Role, error: BaseException) -> None:
        """The compute thread has ended: say why in one line, with the exit code that fits."""
        if isinstance(error, Refused):
            role.failed(ExitCode.REFUSED, str(error))
        elif isinstance(error, HiddenMismatch):
            role.failed(ExitCode.DIVERGED, f"DIVERGED rank {self.topology.rank}: {error}")
        elif isinstance(error, PipeClosed):
            log.debug("the pipe was closed: %s", error)  # the link's loss has been dealt with
        elif isinstance(error, RankLost):
            role.failed(ExitCode.RANK_LOST, str(error))
        else:
            log.error("the compute thread failed", exc_info=error)
            text = str(error).splitlines()[0] if str(error) else ""
            role.failed(
                ExitCode.RANK_LOST, f"rank {self.topology.rank} failed: {type(error).__name__}: {text}"
            )

    # ---- entries ----

    @property
    def watermark(self) -> int:
        """The last step whose work this rank has finished."""
        assert self.scheduler is not None
        return self.scheduler.step if self._finished_step == self._queued_step else self._finished_step

    def apply(self, entry: Entry) -> Plan:
        """Take the next entry into this rank's replica. Nothing of it is computed yet."""
        assert self.scheduler is not None, "an entry came before this rank had started"
        self._flip(entry.step)
        return self.scheduler.apply(entry)

    def work(self, plan: Plan) -> None:
        """Compute a plan whose digest is agreed, and begin its copies."""
        if not plan.empty:
            self._queued_step = plan.step
            self.worker.submit(plan)

    def status(self) -> StageStatus:
        """This rank's books as of the step it applied last."""
        assert self.scheduler is not None and self.started is not None
        size, cache = self.started.sizes[self.topology.rank], self.scheduler.cache
        return StageStatus(
            rank=self.topology.rank,
            pp_rank=self.topology.pp_rank,
            tp_rank=self.topology.tp_rank,
            pid=os.getpid(),
            layers=size.layers,
            bytes_per_token=size.bytes_per_token,
            device=cache.device.books(),
            host=cache.host.books() if cache.host.allocator.page_count else None,
            state=None,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            step=self.scheduler.step,
            digest=show(self.scheduler.digest),
            counters=counters(self.scheduler),
            bytes_copied=self.worker.bytes_copied(),
        )

    def _flip(self, step: int) -> None:
        """Plant the divergence that a test asked for."""
        flip, scheduler = self._faults.flip, self.scheduler
        if flip is None or flip.rank != self.topology.rank or flip.step != step or scheduler is None:
            return
        if flip.field == "retractions":
            scheduler.retractions += 1
        elif flip.field == "finished":
            scheduler.finished += 1
        elif flip.field == "clock":
            scheduler.cache.clock += 1
        else:
            scheduler.allocator.release(scheduler.allocator.allocate(1))


class Follower:
    """The role of every rank but the leader: obeys the log, compares, reports."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._leader_link = stage.links.log[0]
        self._parted = False
        self._early: list[Frame] = []

    def started(self, started: Started) -> None:
        """The leader may have been a moment faster: take the entries that it has sent meanwhile."""
        for frame in self._early:
            self._take_entry(frame)
        self._early.clear()

    def receive(self, link: Link, frame: Frame) -> None:
        """An entry, or the end."""
        if link is not self._leader_link:
            log.warning("%s sent a frame of kind %s, which is not its to send", link.name, frame.kind.name)
        elif frame.kind is Kind.FATAL:
            self._obey_end(msgspec.msgpack.decode(frame.body, type=Fatal))
        elif frame.kind is Kind.ENTRY and self._stage.scheduler is None:
            self._early.append(frame)
        elif frame.kind is Kind.ENTRY:
            self._take_entry(frame)

    def _take_entry(self, frame: Frame) -> None:
        if self._parted:
            return
        stage, rank = self._stage, self._stage.topology.rank
        plan = stage.apply(msgspec.msgpack.decode(frame.body, type=Entry))
        if plan.digest != frame.digest:
            self._parted = True
            assert stage.scheduler is not None
            words = Parted(
                rank=rank, step=plan.step, digest=plan.digest, vector=stage.scheduler.state.numbers
            )
            self._leader_link.send(Kind.VECTOR, msgspec.msgpack.encode(words))
            return
        stage.work(plan)
        for control in plan.controls:
            self._obey(control)

    def _obey(self, control: Control) -> None:
        if control.action == "status":
            self._leader_link.send(Kind.STATUS, msgspec.msgpack.encode(self._stage.status()))
        elif control.action == "shutdown":
            self._stage.end(ExitCode.DRAINED)

    def _obey_end(self, fatal: Fatal) -> None:
        """Leave with the leader's code. Where the front end's last line may be on another machine, say it here too."""
        if fatal.exit_code != ExitCode.DRAINED and self._stage.config.link_address is not None:
            log.error("%s", fatal.message)
        self._stage.end(fatal.exit_code)

    def lost(self, link: Link, reason: str) -> None:
        """Without the leader there is nothing to obey; the loss of a neighbour is the leader's to judge."""
        if link is self._leader_link:
            log.error("%s %s; this rank ends", link.name, reason)
            self._stage.end(ExitCode.RANK_LOST)
        else:
            self.failed(ExitCode.RANK_LOST, f"{link.name} {reason}")

    def report(self, report: Report) -> None:
        """News goes to the leader."""
        self._leader_link.send(Kind.REPORT, msgspec.msgpack.encode(report))

    def failed(self, code: int, message: str) -> None:
        """Tell the leader, who ends all ranks with one line."""
        self._leader_link.send(Kind.FATAL, msgspec.msgpack.encode(Fatal(exit_code=code, message=message)))

    def turn(self) -> None:
        """Nothing is due by the clock."""
