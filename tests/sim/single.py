"""One scheduler driven by hand: tests say what an entry brings and look at the plan that it leads to.

Every plan is also played on shadow memory, and the books are counted again after every step, so that a test which
looks at one decision still fails when another thing goes wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.scheduler.scheduler import Scheduler
from engine.types import (
    Abort,
    Capacity,
    Control,
    Entry,
    Finish,
    FinishReason,
    Plan,
    Request,
    RetiredStep,
    SamplingParams,
    Span,
    Transfer,
    TransferResult,
)
from tests.sim.model import Pins, ShadowMemory, Truth
from tests.sim.recount import recount


def capacity(**changes: Any) -> Capacity:
    """Counts of a small cluster with one step in flight: 64 pages of 4 tokens."""
    counts = {
        "page_size": 4,
        "device_pages": 64,
        "max_running_requests": 8,
        "chunk_tokens": 64,
        "depth": 1,
        "context_length": 1000,
        "growth_tokens": 0,
    }
    return Capacity(**(counts | changes))


def request(
    request_id: int,
    prompt: Sequence[int],
    new: int = 4,
    *,
    delivered: Sequence[int] = (),
    salt: str = "",
    **sampling: Any,
) -> Request:
    """A greedy request for `new` tokens."""
    params = SamplingParams(max_new_tokens=new, temperature=0.0, **sampling)
    return Request(
        request_id=request_id,
        rid=str(request_id),
        prompt_ids=tuple(prompt),
        delivered_ids=tuple(delivered),
        sampling=params,
        cache_salt=salt,
    )


class Driver:
    """Applies entries and answers its own sampling spans, by a rule that a test may change."""

    def __init__(
        self, *, policy: str = "fcfs", cache_prefixes: bool = True, host_counts: bool = True, **changes: Any
    ) -> None:
        self.scheduler = Scheduler(
            capacity(**changes),
            schedule_policy=policy,
            cache_prefixes=cache_prefixes,
            host_counts=host_counts,
        )
        counts = self.scheduler.capacity
        self.memory = ShadowMemory(counts.page_size, counts.device_pages, counts.host_pages)
        self.pins = Pins(counts.page_size)
        self.copies: dict[int, Transfer] = {}
        self.cached_host: dict[int, int] = {}
        self.truths: dict[int, Truth] = {}
        self.token: Callable[[Span], int] = lambda span: 100 + span.end
        self.in_flight: deque[Plan] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}

    def step(
        self,
        *arrivals: Request,
        retire: int = 1000,
        settle: int = 1000,
        fail: bool = False,
        aborts: Sequence[int] = (),
        finishes: Sequence[Finish] = (),
        flush: bool = False,
    ) -> Plan:
        """Apply one entry. It retires at most `retire` of the steps in flight and settles at most `settle` of the
        copies under way, the oldest first; with `fail` these have failed."""
        retired = []
        while self.in_flight and len(retired) < retire:
            plan = self.in_flight.popleft()
            tokens = tuple(self.token(span) for span in plan.spans if span.sample is not None)
            retired.append(RetiredStep(step=plan.step, tokens=tokens))
        settled = []
        for transfer_id, transfer in list(self.copies.items())[:settle]:
            ok = not fail and self.memory.finish(self.copies.pop(transfer_id))
            self.copies.pop(transfer_id, None)
            settled.append(TransferResult(transfer_id=transfer.transfer_id, ok=ok))
        entry = Entry(
            step=self.scheduler.step + 1,
            settled=tuple(settled),
            retired=tuple(retired),
            finishes=tuple(finishes),
            arrivals=arrivals,
            aborts=tuple(Abort(request_id=request_id, message="left") for request_id in aborts),
            controls=(Control(action="flush", control_id=7),) if flush else (),
        )
        self.truths |= {arrival.request_id: Truth(arrival) for arrival in arrivals}
        plan = self.scheduler.apply(entry)
        recount(self.scheduler)
        if plan.spans:
            self.in_flight.append(plan)
        for emission in plan.emissions:
            self.tokens.setdefault(emission.request_id, []).extend(emission.tokens)
            for token in emission.tokens:
                self.truths[emission.request_id].append(token)
            self.cached[emission.request_id] = emission.cached_tokens
            self.cached_host[emission.request_id] = emission.cached_host_tokens
            if emission.finish is not None:
                self.ends[emission.request_id] = emission.finish
        self.pins.retire([step.step for step in retired])
        self.pins.settle([result.transfer_id for result in settled])
        self.pins.plan(plan)
        for transfer in plan.transfers:
            self.copies[transfer.transfer_id] = transfer
            if transfer.kind == "load":
                self.memory.begin(transfer)
        self.memory.run(plan, self.truths)
        for transfer in plan.transfers:
            if transfer.kind == "backup":
                self.memory.begin(transfer)
        return plan

    def run(self, *arrivals: Request, steps_max: int = 1000) -> int:
        """Step until nothing lives; returns how many steps that took."""
        self.step(*arrivals)
        steps = 1
        while self.scheduler.live or self.in_flight or self.copies:
            self.step()
            steps += 1
            assert steps < steps_max, f"requests {list(self.scheduler.live)} do not end"
        return steps

    def run_until_decoding(self, *arrivals: Request) -> None:
        """Step until all prompts are computed."""
        self.step(*arrivals)
        while self.scheduler.waiting or any(sequence.remaining > 1 for sequence in self.scheduler.running):
            self.step()


def rows(plan: Plan) -> dict[int, tuple[int, int]]:
    """A plan in short: request -> [start, end) of its span."""
    return {span.request_id: (span.start, span.end) for span in plan.spans}


def decoding_trio(**changes: int) -> Driver:
    """Three sequences of 8 tokens that decode, in a pool where each has room for 4 more and no page is left."""
    driver = Driver(page_size=4, device_pages=9, **changes)
    driver.step(*(request(i, [i] * 8, new=20) for i in (1, 2, 3)))
    return driver
