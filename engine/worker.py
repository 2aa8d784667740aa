"""The compute thread of a rank: plans in, finished steps out, in the order of the log.

It brings the rank up (`startup.Startup`), then takes one plan after another: hidden states of the stage before, this
stage's layers, hidden states to the next stage or, on the last, sampled tokens. It owns weights, pool and batch. It
never decides anything and never touches the scheduler: a plan says all there is to do, and news goes to the outbox.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.distributed import pipe
from engine.distributed.links import Link
from engine.distributed.pipe import HiddenIn
from engine.faults import Faults
from engine.model.batch import Batch
from engine.model.readout import read_out
from engine.startup import Started
from engine.topology import Topology
from engine.types import FinishedStep, Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """A step's work is finished on this rank; `finished` is set on the rank that reports tokens."""

    step: int
    finished: FinishedStep | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The compute thread has ended, and why."""

    error: BaseException


News = Started | Done | Failed


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
        self._started: Started | None = None

    def start(self, bring_up: Callable[[], Started]) -> None:
        """Start the thread; it brings the rank up first, and its first news is `Started` or `Failed`."""
        # A daemon: a stage that waits for hidden states must not keep a process that ends.
        threading.Thread(target=self._run, args=(bring_up,), name="compute", daemon=True).start()

    def submit(self, plan: Plan) -> None:
        """Queue a plan that has spans."""
        self._inbox.put(plan)

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
                self._tell(self._started)
                while True:
                    plan = self._inbox.get()
                    self._tell(Done(plan.step, self._compute(plan, self._started)))
        except BaseException as error:
            self._tell(Failed(error))

    def _tell(self, news: News) -> None:
        self._outbox.put(news)
        self._wake()

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
