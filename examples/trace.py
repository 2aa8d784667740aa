"""A public request trace through two schedulers whose host tiers differ, as an unagreed `--hicache-size` makes them.

Pure: no model, no processes. Each stage's scheduler is the engine's own; requests come one after the other, a copy
settles as soon as it is planned. Nothing stops a stage here when it parts from the other: that is what is looked for.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.scheduler.scheduler import Scheduler
from engine.types import Capacity, Entry, Request, RetiredStep, SamplingParams, TransferResult

TRACE = Path(__file__).parent.parent / "tests" / "data" / "conversation_trace.jsonl.gz"
PAGE_TOKENS = 512
"""A block of the trace, which names each by an id, is one page."""


@dataclass(frozen=True)
class Seen:
    """One stage's answer to one request."""

    seconds: float
    """Time of the request since the start of the trace."""
    device_tokens: int
    host_tokens: int
    """Of its prompt, found on the device and behind that on the host."""
    host_used: int
    """Tokens in the host tier afterwards."""


def requests(path: Path = TRACE) -> Iterator[tuple[float, list[int]]]:
    """Each request's time in seconds and the ids of its blocks."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            one = json.loads(line)
            yield one["timestamp"] / 1000, one["hash_ids"]


def replay(
    device_tokens: int,
    host_tokens: int,
    *,
    stop: int | None = None,
    progress: Callable[[], None] | None = None,
) -> list[Seen]:
    """Run the first `stop` requests (all, if absent) through one stage with these capacities."""
    scheduler = Scheduler(
        Capacity(
            page_size=PAGE_TOKENS,
            device_pages=device_tokens // PAGE_TOKENS,
            max_running_requests=1,
            chunk_tokens=device_tokens,
            depth=1,
            context_length=device_tokens,
            host_pages=host_tokens // PAGE_TOKENS,
        )
    )
    seen = []
    for number, (seconds, blocks) in enumerate(requests()):
        if number == stop:
            break
        cached, on_host = _serve(scheduler, number, blocks)
        used = scheduler.cache.host.pages_total * PAGE_TOKENS
        seen.append(Seen(seconds, cached - on_host, on_host, used))
        if progress is not None:
            progress()
    return seen


def first_difference(one: list[Seen], other: list[Seen]) -> int | None:
    """The first request for which two stages find different prefixes."""
    for number, (mine, its) in enumerate(zip(one, other, strict=True)):
        if mine.device_tokens + mine.host_tokens != its.device_tokens + its.host_tokens:
            return number
    return None


def _serve(scheduler: Scheduler, number: int, blocks: list[int]) -> tuple[int, int]:
    """One request from its arrival to its only token; returns its cached tokens, and how many came from the host."""
    # One token more than the blocks, so that all of them may be found: a match leaves one row to compute.
    prompt = [block for block in blocks for _ in range(PAGE_TOKENS)] + [0]
    arrivals = (
        Request(
            request_id=number + 1,
            rid="",
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        ),
    )
    settled: tuple[TransferResult, ...] = ()
    retired: tuple[RetiredStep, ...] = ()
    found = (0, 0)
    while arrivals or retired or settled or scheduler.live:
        plan = scheduler.apply(
            Entry(step=scheduler.step + 1, settled=settled, retired=retired, arrivals=arrivals)
        )
        for emission in plan.emissions:
            found = emission.cached_tokens, emission.cached_host_tokens
        settled = tuple(TransferResult(transfer_id=copy.transfer_id, ok=True) for copy in plan.transfers)
        samples = sum(span.sample is not None for span in plan.spans)
        retired = (RetiredStep(step=plan.step, tokens=(0,) * samples),) if plan.spans else ()
        arrivals = ()
    return found
