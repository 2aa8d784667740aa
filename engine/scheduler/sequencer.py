"""The leader's inbox: news in, numbered entries out. The only place where the order of events is chosen.

Pure: the time is an argument, and deadlines leave here as ordinary entries. It reads the leader's own replica to see
what is alive and how much is in flight, and never changes it. What a limit refuses is answered here and not logged.
"""

from __future__ import annotations

from engine.scheduler import policy
from engine.scheduler.scheduler import Scheduler
from engine.types import Abort, Control, Entry, Finish, Refused, Report, Request, RetiredStep, TransferResult

LAG_STEPS_MAX = 64
"""No new entry while the slowest rank is further behind than this; the bounded inbox then refuses."""
INBOX_IDS_MAX = 2**22
"""Token ids that may wait to be logged: an entry takes them all, and must fit into one frame."""
DRAIN_MESSAGE = "the server is shutting down"


class Sequencer:
    """Collects news and makes the next entry when it is due."""

    def __init__(self, scheduler: Scheduler, *, world_size: int, queued_max: int) -> None:
        self._scheduler = scheduler
        self._queued_max = queued_max
        self._watermarks = [0] * world_size
        self._copied: dict[int, dict[int, bool]] = {}
        self._settled: list[TransferResult] = []
        self._retired: list[RetiredStep] = []
        self._finishes: list[Finish] = []
        self._arrivals: list[Request] = []
        self._aborts: dict[int, Abort] = {}
        self._controls: list[Control] = []
        self._last_plan_empty = True
        self._drain_deadline: float | None = None
        self._shutdown_logged = False

    # ---- news ----

    def submit(self, requests: tuple[Request, ...]) -> Refused | None:
        """Take requests, all or none of them. Returns why not, with the HTTP status, if none."""
        scheduler = self._scheduler
        status, message = 0, ""
        if self._drain_deadline is not None:
            status, message = 503, DRAIN_MESSAGE
        problem = next(
            filter(None, (policy.does_not_fit(request, scheduler.capacity) for request in requests)), ""
        )
        if problem:
            status, message = 400, problem
        free = max(scheduler.capacity.max_running_requests - len(scheduler.running), 0)
        queued = len(scheduler.waiting) + len(self._arrivals) + len(requests)
        if not status and queued > self._queued_max + free:
            status = 429
            message = f"the queue is full: {queued} requests would wait, at most {self._queued_max} may"
        ids_waiting = sum(len(r.prompt_ids) + len(r.delivered_ids) for r in (*self._arrivals, *requests))
        if not status and self._arrivals and ids_waiting > INBOX_IDS_MAX:
            status = 429
            message = f"the inbox is full: {ids_waiting} tokens would wait to be logged, at most {INBOX_IDS_MAX} may"
        if status:
            ids = tuple(request.request_id for request in requests)
            return Refused(request_ids=ids, status=status, message=message)
        self._arrivals += requests
        return None

    def abort(self, abort: Abort) -> None:
        """End a request. One that is not alive any more is no news, and neither is a second abort."""
        if self._is_alive(abort.request_id):
            self._aborts.setdefault(abort.request_id, abort)

    def finish(self, finish: Finish) -> None:
        """End a request at a stop string."""
        if self._is_alive(finish.request_id):
            self._finishes.append(finish)

    def control(self, control: Control) -> None:
        """Something for all ranks."""
        self._controls.append(control)

    def report(self, report: Report) -> None:
        """What a rank learnt."""
        self._watermarks[report.rank] = max(self._watermarks[report.rank], report.watermark)
        self._retired += [RetiredStep(step=done.step, tokens=done.tokens) for done in report.finished]
        for result in report.transfers:
            ranks = self._copied.setdefault(result.transfer_id, {})
            assert report.rank not in ranks, f"rank {report.rank} reports transfer {result.transfer_id} twice"
            ranks[report.rank] = result.ok
            if len(ranks) == len(self._watermarks):
                del self._copied[result.transfer_id]
                self._settled.append(TransferResult(transfer_id=result.transfer_id, ok=all(ranks.values())))

    def drain(self, deadline: float) -> None:
        """Take no more requests; what still lives at `deadline` is aborted; then all ranks shut down."""
        self._drain_deadline = deadline

    @property
    def draining(self) -> bool:
        """True once `drain` was called."""
        return self._drain_deadline is not None

    def _is_alive(self, request_id: int) -> bool:
        return request_id in self._scheduler.live or any(r.request_id == request_id for r in self._arrivals)

    # ---- entries ----

    def next_entry(self, now: float) -> Entry | None:
        """The next entry if one is due: there is news, or a plan may have more to do than it could.

        The caller applies it to the leader's replica at once and tells `planned` whether the plan was empty.
        """
        scheduler = self._scheduler
        if self._drain_deadline is not None:
            self._drain(now, self._drain_deadline)
        if scheduler.step + 1 - min(self._watermarks) > LAG_STEPS_MAX:
            return None
        news = (
            self._settled
            or self._retired
            or self._finishes
            or self._arrivals
            or self._aborts
            or self._controls
        )
        more = not self._last_plan_empty and len(scheduler.in_flight) < scheduler.capacity.depth
        if not news and not more:
            return None
        entry = Entry(
            step=scheduler.step + 1,
            settled=tuple(self._settled),
            retired=tuple(self._retired),
            finishes=tuple(self._finishes),
            arrivals=tuple(self._arrivals),
            aborts=tuple(self._aborts.values()),
            controls=tuple(self._controls),
        )
        self._settled, self._retired, self._finishes = [], [], []
        self._arrivals, self._aborts, self._controls = [], {}, []
        return entry

    def planned(self, *, empty: bool) -> None:
        """What came of the entry that `next_entry` returned last."""
        self._last_plan_empty = empty

    def _drain(self, now: float, deadline: float) -> None:
        scheduler = self._scheduler
        if now >= deadline:
            for request_id in scheduler.live:
                self.abort(Abort(request_id=request_id, message=DRAIN_MESSAGE, status=503))
        busy = scheduler.live or self._arrivals or scheduler.in_flight
        # A copy that hangs must not hold up the end: nothing outlives the process that it could harm.
        idle = not busy and (not scheduler.hicache.under_way or now >= deadline)
        if idle and not self._shutdown_logged:
            self._shutdown_logged = True
            self._controls.append(Control(action="shutdown", control_id=0))
