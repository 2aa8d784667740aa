"""The compute thread of a rank: plans in, finished steps out, in the order of the log.

It brings the rank up (`startup.Startup`), then takes one plan after another: hidden states of the stage before, this
stage's layers, hidden states to the next stage or, on the last, sampled tokens. It owns weights, pool and batch. Copies
between tiers go to the mover at their place in this order: loads before the step's compute, so after that of all
earlier steps, and backups after it. The thread never decides anything and never touches the scheduler: a plan says all
there is to do, and news goes to the outbox.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from engine.distributed import pipe
from engine.distributed.links import Link
from engine.distributed.pipe import HiddenIn
from engine.faults import Faults
from engine.mem_cache.pool.mover import Mover
from engine.model.batch import Batch
from engine.model.readout import read_out
from engine.startup import Started
from engine.topology import Topology
from engine.types import FinishedStep, Plan, TransferResult

COPY_THREADS_MAX = 2
"""Two threads come near to a machine's memory bandwidth."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """A step's compute is finished on this rank; its backups may still run.

    `finished` is set on the rank that reports tokens, when the step had spans.
    """

    step: int
    finished: FinishedStep | None


@dataclass(frozen=True, slots=True)
class Copied:
    """A transfer has ended on this rank."""

    result: TransferResult


@dataclass(frozen=True, slots=True)
class Failed:
    """The compute thread has ended, and why."""

    error: BaseException


News = Started | Done | Copied | Failed


class Worker:
    """One thread and what it computes with."""

    def __init__(
        self, topology: Topology, next_link: Link | None, faults: Faults, wake: Callable[[], None]
    ) -> None:
        """`wake` is called after news has been put into the outbox."""
        self.hidden_in = HiddenIn()
        self._topology = topology
        self._next_link = next_link
        self._wake = wake
        self._slow_s = faults.slow.seconds if faults.slow and faults.slow.rank == topology.rank else 0.0
        self._crash_step = faults.crash.step if faults.crash and faults.crash.rank == topology.rank else None
        self._inbox: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._copy_fault = faults.copy_of(topology.rank)
        self._started: Started | None = None
        self._mover: Mover | None = None

    def start(self, bring_up: Callable[[], Started]) -> None:
        """Start the thread; it brings the rank up first, and its first news is `Started` or `Failed`."""
        # A daemon: a stage that waits for hidden states must not keep a process that ends.
        threading.Thread(target=self._run, args=(bring_up,), name="compute", daemon=True).start()

    def submit(self, plan: Plan) -> None:
        """Queue a plan that has spans or transfers."""
        self._inbox.put(plan)

    def bytes_copied(self) -> dict[str, int]:
        """Bytes that this rank has copied between tiers, by kind of transfer; empty without a host tier."""
        return {} if self._mover is None else self._mover.bytes_moved

    def news(self) -> list[News]:
        """All that has happened since the last call. Never waits."""
        found: list[News] = []
        while not self._outbox.empty():
            found.append(self._outbox.get())
        return found

    def _run(self, bring_up: Callable[[], Started]) -> None:
        try:
            with torch.inference_mode():
                self._started = bring_up()
                self._mover = self._start_mover(self._started)
                self._tell(self._started)
                while True:
                    plan = self._inbox.get()
                    self._tell(Done(plan.step, self._work(plan, self._started)))
        except BaseException as error:
            self._tell(Failed(error))

    def _tell(self, news: News) -> None:
        self._outbox.put(news)
        self._wake()

    def _start_mover(self, started: Started) -> Mover | None:
        if started.host_pool is None:
            return None
        return Mover(
            started.pool,
            started.host_pool,
            report=lambda result: self._tell(Copied(result)),
            checksums=started.host_checksums,
            threads=min(started.threads, COPY_THREADS_MAX),
            fault=self._copy_fault,
        )

    def _work(self, plan: Plan, started: Started) -> FinishedStep | None:
        """All of one plan. A plan without spans receives, sends and computes nothing."""
        self._copy(plan, "load")
        finished = self._compute(plan, started) if plan.spans else None
        self._copy(plan, "backup")
        return finished

    def _copy(self, plan: Plan, kind: Literal["load", "backup"]) -> None:
        for transfer in plan.transfers:
            if transfer.kind == kind:
                assert self._mover is not None, f"step {plan.step} copies, but there is no host tier"
                self._mover.submit(transfer)

    def _compute(self, plan: Plan, started: Started) -> FinishedStep | None:
        """One step on this stage. Raises HiddenMismatch or PipeClosed before anything is computed."""
        if self._slow_s:
            time.sleep(self._slow_s)
        if self._crash_step is not None and plan.step >= self._crash_step:
            raise RuntimeError("a fault on purpose")
        batch = Batch.build(plan.spans, started.capacity.page_size, started.device, started.dtype)
        hidden = None
        if not self._topology.is_first_stage:
            shape = (batch.row_count, started.decoder.spec.hidden_size)
            hidden = self.hidden_in.take(plan.step, plan.digest, shape, started.dtype).to(started.device)
        hidden = started.decoder.forward(batch, hidden, started.pool)
        if self._next_link is not None:
            pipe.send(self._next_link, plan.step, plan.digest, hidden)
        if not self._topology.reports_tokens:
            return None
        readout = read_out(started.decoder, batch, hidden)
        return FinishedStep(step=plan.step, tokens=readout.tokens, logprobs=readout.logprobs)
