"""The leader: sockets and clock around the sequencer, emissions to the front end.

The only rank that makes entries. Everything that happens (requests, reports, aborts) goes into the sequencer's inbox
first and takes effect when it comes out as an entry, on the leader as on every other rank. It also judges: lost
ranks, parted replicas, stuck work; whatever ends the service ends it here, with one line and one exit code.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque

import msgspec

from engine.distributed.frames import Frame, Kind
from engine.distributed.launch import ExitCode
from engine.distributed.links import Link
from engine.scheduler.digest import show
from engine.scheduler.sequencer import Sequencer
from engine.scheduler.state_vector import STATE_FIELDS, State
from engine.stage import Parted, Stage
from engine.startup import Started
from engine.types import (
    Abort,
    Control,
    ControlResult,
    Emission,
    Emissions,
    Entry,
    Fatal,
    Finish,
    Plan,
    Pulse,
    Ready,
    Refused,
    Report,
    SpanLogprobs,
    StageStatus,
    Submit,
    TokenLogprob,
)

PULSE_S = 0.5
STATES_KEPT = 256
"""Steps whose state can be looked at when a rank parts; no rank lags further behind."""
LAST_WORDS_S = 1.0
FAREWELL_S = 5.0
"""How long the leader waits for the other ranks to leave after a shutdown."""

log = logging.getLogger(__name__)


class Leader:
    """The role of rank 0."""

    def __init__(self, stage: Stage, front: Link) -> None:
        """`front` is the link to the front end."""
        self._stage = stage
        self._front = front
        stage.poller.add(front, heartbeats=False)
        self._sequencer: Sequencer | None = None
        self._states: deque[tuple[int, int, State]] = deque(maxlen=STATES_KEPT)
        self._statuses: dict[int, list[StageStatus]] = {}
        self._status_controls: dict[int, list[int]] = {}
        self._logprobs: dict[int, tuple[list[TokenLogprob], list[TokenLogprob]]] = {}
        self._pulsed_at = 0.0
        self._progress_at = time.monotonic()
        self._leaving_at: float | None = None
        self._others = set(stage.links.log)
        self._drain_asked = False

    def ask_to_drain(self, *_: object) -> None:
        """For SIGTERM: let what runs finish, then end. During the start there is nothing to finish."""
        self._drain_asked = True
        self._stage.poller.wake()

    def listen_to_signals(self) -> None:
        """Only the leader turns signals into a drain."""
        signal.signal(signal.SIGTERM, self.ask_to_drain)
        signal.signal(signal.SIGINT, self.ask_to_drain)

    # ---- what happens ----

    def started(self, started: Started) -> None:
        """All ranks can serve: tell the front end what was agreed."""
        stage = self._stage
        assert stage.scheduler is not None
        self._sequencer = Sequencer(
            stage.scheduler,
            world_size=stage.topology.world_size,
            queued_max=stage.config.max_queued_requests,
        )
        self._progress_at = time.monotonic()
        capacity = started.capacity
        self._tell(
            Ready(
                capacity_tokens=capacity.device_pages * capacity.page_size,
                max_running_requests=capacity.max_running_requests,
                page_size=capacity.page_size,
                context_length=capacity.context_length,
                chunked_prefill_size=capacity.chunk_tokens,
                dtype=str(started.dtype).removeprefix("torch."),
                kv_cache_dtype=str(started.cache_dtype).removeprefix("torch."),
                device=started.device.type,
                threads_per_rank=started.threads,
                stages=started.sizes,
            )
        )

    def receive(self, link: Link, frame: Frame) -> None:
        """A report of a rank, or a message of the front end."""
        if link is self._front:
            if frame.kind is Kind.MESSAGE:
                self._hear(msgspec.msgpack.decode(frame.body, type=Submit | Abort | Finish | Control))
        elif frame.kind is Kind.REPORT:
            self.report(msgspec.msgpack.decode(frame.body, type=Report))
        elif frame.kind is Kind.STATUS:
            self._take_status(msgspec.msgpack.decode(frame.body, type=StageStatus))
        elif frame.kind is Kind.VECTOR:
            self._judge(msgspec.msgpack.decode(frame.body, type=Parted))
        elif frame.kind is Kind.FATAL and self._leaving_at is None:
            fatal = msgspec.msgpack.decode(frame.body, type=Fatal)
            self.failed(fatal.exit_code, fatal.message)

    def _hear(self, message: Submit | Abort | Finish | Control) -> None:
        if self._sequencer is None:
            if isinstance(message, Control) and message.action == "drain":
                self._drain_asked = True
            return
        if isinstance(message, Submit):
            refused = self._sequencer.submit(message.requests)
            if refused is not None:
                self._tell(refused)
        elif isinstance(message, Abort):
            self._sequencer.abort(message)
        elif isinstance(message, Finish):
            self._sequencer.finish(message)
        elif message.action == "drain":
            self._drain_asked = True
        else:
            self._sequencer.control(message)

    def report(self, report: Report) -> None:
        """News of a rank, this one included: into the inbox, log probabilities aside."""
        assert self._sequencer is not None, f"rank {report.rank} reports before the start has ended"
        self._sequencer.report(report)
        if report.finished:
            self._progress_at = time.monotonic()
        for finished in report.finished:
            for span in finished.logprobs:
                self._keep(span)

    def lost(self, link: Link, reason: str) -> None:
        """A rank or the front end is gone, so the service is."""
        if link is self._front:
            log.error("the front end %s; all ranks end", reason)
            self.failed(ExitCode.RANK_LOST, f"the front end {reason}")
            return
        if self._leaving_at is not None:
            self._others = {rank for rank in self._others if self._stage.links.log[rank] is not link}
            return
        self.failed(ExitCode.RANK_LOST, f"{self._named(link)} {reason}")

    def _named(self, link: Link) -> str:
        for rank, known in self._stage.links.log.items():
            if known is link:
                tp_size = self._stage.topology.tp_size
                return f"rank {rank} [PP{rank // tp_size} TP{rank % tp_size}]"
        return link.name

    def failed(self, code: int, message: str) -> None:
        """End the service: every rank and the front end hear the code and the line."""
        body = msgspec.msgpack.encode(Fatal(exit_code=code, message=message))
        for link in (*self._stage.links.log.values(), self._front):
            link.send(Kind.FATAL, body)
        self._stage.poller.flush(LAST_WORDS_S)
        self._stage.end(code)

    # ---- entries ----

    def turn(self) -> float:
        """Make the entries that are due; send a pulse when it is time."""
        now = time.monotonic()
        if self._drain_asked:
            self._start_drain(now)
        if self._leaving_at is not None:
            if not self._others or now - self._leaving_at > FAREWELL_S:
                self.failed(ExitCode.DRAINED, "drained")
            return 0.1
        if self._sequencer is not None:
            while (entry := self._sequencer.next_entry(now)) is not None:
                if self._lead(entry):
                    return 0.0
        if now - self._pulsed_at >= PULSE_S:
            self._pulse(now)
        return max(self._pulsed_at + PULSE_S - now, 0.0)

    def _lead(self, entry: Entry) -> bool:
        """Apply an entry here, send it to all with the digest it led to, and deliver what it brought.

        Returns True when it was the last one.
        """
        stage, sequencer = self._stage, self._sequencer
        assert sequencer is not None and stage.scheduler is not None
        if not stage.scheduler.live:
            self._progress_at = time.monotonic()  # idle until now: the watchdog counts from this arrival
        plan = stage.apply(entry)
        sequencer.planned(empty=plan.empty)
        self._states.append((plan.step, plan.digest, stage.scheduler.state))
        body = msgspec.msgpack.encode(entry)
        for link in stage.links.log.values():
            link.send(Kind.ENTRY, body, step=plan.step, digest=plan.digest)
        stage.work(plan)
        self._deliver(plan)
        for result in plan.control_failures:
            self._tell(result)
        for control in plan.controls:
            self._obey(control, plan.step)
        return any(control.action == "shutdown" for control in plan.controls)

    def _obey(self, control: Control, step: int) -> None:
        if control.action == "status":
            self._status_controls.setdefault(step, []).append(control.control_id)
            if len(self._status_controls[step]) == 1:
                self._take_status(self._stage.status())
        elif control.action == "shutdown":
            self._leaving_at = time.monotonic()
        else:
            self._tell(ControlResult(control_id=control.control_id, ok=True))

    def _start_drain(self, now: float) -> None:
        self._drain_asked = False
        if self._sequencer is None:
            self.failed(ExitCode.DRAINED, "stopped during the start")
        elif not self._sequencer.draining:
            self._sequencer.drain(now + self._stage.config.drain_timeout)

    # ---- to the front end ----

    def _tell(self, message: Ready | Refused | ControlResult | Emissions) -> None:
        self._front.send(Kind.MESSAGE, msgspec.msgpack.encode(message))

    def _pulse(self, now: float) -> None:
        scheduler = self._stage.scheduler
        self._pulsed_at = now
        if scheduler is None or self._sequencer is None:
            return
        pending = bool(scheduler.live or scheduler.in_flight or scheduler.hicache.under_way)
        pulse = Pulse(
            stuck=pending and now - self._progress_at > self._stage.config.watchdog_timeout,
            draining=self._sequencer.draining,
        )
        self._front.send(Kind.PULSE, msgspec.msgpack.encode(pulse))

    def _deliver(self, plan: Plan) -> None:
        """Send a step's emissions, each joined by the log probabilities that came with its tokens."""
        emissions = []
        for emission in plan.emissions:
            kept = self._logprobs.pop(emission.request_id, None)
            if kept is not None:
                prompt, output = kept
                emission = msgspec.structs.replace(
                    emission,
                    prompt_logprobs=tuple(prompt),
                    output_logprobs=tuple(output[: len(emission.tokens)]),
                )
            emissions.append(emission)
        assert self._stage.scheduler is not None
        for request_id, (prompt, _) in self._logprobs.items():
            # A chunk in the middle of a prompt: log probabilities without a token.
            if request_id in self._stage.scheduler.live and prompt:
                emissions.append(
                    Emission(request_id=request_id, first_position=0, prompt_logprobs=tuple(prompt))
                )
        self._logprobs.clear()
        if emissions:
            self._tell(Emissions(step=plan.step, emissions=tuple(emissions)))

    def _keep(self, span: SpanLogprobs) -> None:
        prompt, output = self._logprobs.setdefault(span.request_id, ([], []))
        prompt += span.prompt
        if span.output is not None:
            output.append(span.output)

    def _take_status(self, status: StageStatus) -> None:
        """Collect the ranks' answers to a status control; all are of one step."""
        answers = self._statuses.setdefault(status.step, [])
        answers.append(status)
        if len(answers) == self._stage.topology.world_size:
            del self._statuses[status.step]
            stages = tuple(sorted(answers, key=lambda one: one.rank))
            for control_id in self._status_controls.pop(status.step):
                self._tell(ControlResult(control_id=control_id, ok=True, stages=stages))

    # ---- divergence ----

    def _judge(self, parted: Parted) -> None:
        """A replica's digest is not the leader's: name the step, the ranks and the first field that differs."""
        mine = next((kept for kept in self._states if kept[0] == parted.step), None)
        tp_size = self._stage.topology.tp_size
        stage, tp_rank = divmod(parted.rank, tp_size)
        ranks = f"rank={parted.rank} [PP{stage} TP{tp_rank}] vs rank=0 [PP0 TP0]"
        if mine is None:
            self.failed(
                ExitCode.DIVERGED, f"DIVERGED step={parted.step} {ranks}: the leader's state is not kept"
            )
            return
        _, digest, state = mine
        for name, ours, theirs in zip(STATE_FIELDS, state.numbers, parted.vector, strict=True):
            if ours != theirs:
                field = f"field={name!r} {theirs} != {ours}"
                break
        else:
            field = "no field differs, only the chain of digests"
        self.failed(
            ExitCode.DIVERGED,
            f"DIVERGED step={parted.step} {ranks} {field} digest={show(parted.digest)} != {show(digest)}",
        )
