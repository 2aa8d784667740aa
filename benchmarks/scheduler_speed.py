"""How long the pure half takes: `python -m benchmarks.scheduler_speed`.

Three questions. What does one decode step cost (entry -> plan, radix tree and digest included) for 16 and 64 sequences
with 2,000 tokens of context each? What does it cost to admit a prompt of 2,080 tokens, 2,048 of them cached, when the
tree has 65,536 nodes: with the prefix in one node, with a node for each of its pages, and cold with every new page to
be won by eviction? And how much of a decode step, with a host tier to which every step backs a page up, is agreement:
the digest, the ids of copies, the comparison, and apart from these the transport of the log? Numbers are medians and
90th percentiles in microseconds, of one thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from random import Random
from unittest import mock

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.undigested import undigested
from engine.distributed.frames import Kind
from engine.distributed.links import Link, Poller, Received
from engine.mem_cache.radix_cache import RadixCache, pack
from engine.scheduler.digest import Accumulator
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequencer import Sequencer
from engine.types import (
    Abort,
    Capacity,
    Entry,
    FinishedStep,
    Plan,
    Report,
    Request,
    RetiredStep,
    SamplingParams,
    TransferResult,
)

PAGE_SIZE = 16
CONTEXT_TOKENS = 2000
DECODE_STEPS = 320
PREFIX_TOKENS, PROMPT_TOKENS = 2048, 2080
TREE_NODES = 65_536
ADMISSIONS = 200
VOCABULARY = 50_000
PASSES = 6
"""How often each way of deciding the same steps is run; ways take turns."""
STAGES = 2
"""Ranks that report each copy."""


def decode_times(sequence_count: int) -> list[float]:
    """Seconds that each of many decode steps took; all sequences are in every step, and fill pages now and then."""
    pages = sequence_count * (CONTEXT_TOKENS + DECODE_STEPS + PAGE_SIZE) // PAGE_SIZE
    scheduler = Scheduler(_capacity(pages, sequence_count))
    draw = Random(1)
    requests = tuple(_request(i, _ids(draw, CONTEXT_TOKENS), DECODE_STEPS + 1) for i in range(sequence_count))
    plan = scheduler.apply(Entry(step=1, arrivals=requests))
    times = []
    for _ in range(DECODE_STEPS):
        tokens = tuple(draw.randrange(VOCABULARY) for _ in plan.spans)
        entry = Entry(step=plan.step + 1, retired=(RetiredStep(step=plan.step, tokens=tokens),))
        plan, seconds = _timed(scheduler, entry)
        assert len(plan.spans) in (0, sequence_count), "all decode together until all end"
        times.append(seconds)
    return times


def admission_times(*, prefix_nodes: int, evict: bool) -> list[float]:
    """Seconds that each of many admissions took, into a tree of TREE_NODES nodes with one page each."""
    draw = Random(2)
    prefix_pages = PREFIX_TOKENS // PAGE_SIZE
    pages_free = 0 if evict else PROMPT_TOKENS // PAGE_SIZE
    scheduler = Scheduler(_capacity(TREE_NODES + prefix_pages + pages_free, 1))
    cache, prefix = scheduler.cache, _ids(draw, PREFIX_TOKENS)
    for _ in range(TREE_NODES):
        _insert(cache, _ids(draw, PAGE_SIZE))
    _insert(cache, prefix)
    for node in range(1, prefix_nodes):
        cache.match(b"", pack(prefix), node)  # Cuts after page `node`.
    times = []
    for number in range(ADMISSIONS):
        known = [] if evict else prefix
        prompt = known + _ids(draw, PROMPT_TOKENS - len(known))
        arrival = Entry(step=scheduler.step + 1, arrivals=(_request(number, prompt, 1),))
        plan, seconds = _timed(scheduler, arrival)
        assert plan.spans[0].start == len(known)
        times.append(seconds)
        retired = RetiredStep(step=plan.step, tokens=(1,))
        abort = Abort(request_id=number, message="enough")
        scheduler.apply(Entry(step=plan.step + 1, retired=(retired,), aborts=(abort,)))
    return times


def hierarchy_times(
    sequence_count: int, seen: Callable[[Plan, Entry], None] = lambda plan, entry: None
) -> list[float]:
    """Like `decode_times`, with a host tier large enough for all: contexts differ by a token each, so that about every
    step fills a page of one of 16 sequences and backs it up; each copy has settled by the next entry.

    `seen` is shown each plan with the entry that followed it.
    """
    pages = sequence_count * (CONTEXT_TOKENS + sequence_count + DECODE_STEPS + PAGE_SIZE) // PAGE_SIZE
    scheduler = Scheduler(_capacity(pages, sequence_count, host_pages=pages))
    draw = Random(1)
    requests = tuple(
        _request(i, _ids(draw, CONTEXT_TOKENS + i), DECODE_STEPS + 1) for i in range(sequence_count)
    )
    plan = scheduler.apply(Entry(step=1, arrivals=requests))
    times = []
    for _ in range(DECODE_STEPS):
        tokens = tuple(draw.randrange(VOCABULARY) for _ in plan.spans)
        entry = Entry(
            step=plan.step + 1,
            settled=tuple(TransferResult(transfer_id=each.transfer_id, ok=True) for each in plan.transfers),
            retired=(RetiredStep(step=plan.step, tokens=tokens),),
        )
        seen(plan, entry)
        plan, seconds = _timed(scheduler, entry)
        times.append(seconds)
    filled = sequence_count * ((CONTEXT_TOKENS + DECODE_STEPS) // PAGE_SIZE - 1)
    assert scheduler.hicache.pages_backed_up >= filled, (
        f"{scheduler.hicache.pages_backed_up} of {filled} pages"
    )
    return times


def agreement_times(sequence_count: int) -> dict[str, list[float]]:
    """Seconds of each decode step with a host tier, and what of them is agreement: digest, ids and comparison.

    The digest is what a step takes longer than the same one decided without (`undigested`), plus the calls that note
    its events, which are in both. Ids are what the leader's inbox does to see that every rank has ended each copy.
    """
    whole, bare = list[float](), list[float]()
    for _ in range(PASSES):
        whole += hierarchy_times(sequence_count)
        with undigested():
            bare += hierarchy_times(sequence_count)
    difference = _percentile(whole, 50) - _percentile(bare, 50)
    calls = _noting_calls(sequence_count)
    times = {"whole step": whole, "without digest": bare}
    times["digest"] = [difference + seconds for seconds in calls]
    times["ids of copies"] = _id_times(sequence_count)
    times["comparison"] = _comparison_times()
    return times


def transport_times(sequence_count: int) -> dict[str, list[float]]:
    """Seconds that the entry of each decode step takes to its bytes, through a link of one process, and back.

    A follower waits besides for the kernel to wake it.
    """
    ours, theirs = (Link(end, "the other end") for end in socket.socketpair())
    poller = Poller()
    poller.add(theirs)
    times: dict[str, list[float]] = {"to bytes": [], "through a link": [], "from bytes": []}

    def carry(plan: Plan, entry: Entry) -> None:
        began = time.perf_counter()
        body = msgspec.msgpack.encode(entry)
        encoded = time.perf_counter()
        ours.send(Kind.ENTRY, body, step=entry.step, digest=plan.digest)
        events = poller.poll(1.0)
        arrived = time.perf_counter()
        assert len(events) == 1 and isinstance(events[0], Received), f"one frame was sent, {events} came"
        decoded = msgspec.msgpack.decode(events[0].frame.body, type=Entry)
        ended = time.perf_counter()
        assert decoded == entry
        spent = encoded - began, arrived - encoded, ended - arrived
        for kept, seconds in zip(times.values(), spent, strict=True):
            kept.append(seconds)

    hierarchy_times(sequence_count, carry)
    ours.close()
    theirs.close()
    return times


def _noting_calls(sequence_count: int) -> list[float]:
    """Seconds that noting takes in each step: the calls that note its events, doing nothing, and the loop over rows."""
    steps: list[list[tuple[int, ...]]] = []
    with mock.patch.object(Accumulator, "note", lambda _, *numbers: steps[-1].append(numbers)):
        steps.append([])
        hierarchy_times(sequence_count, lambda plan, entry: steps.append([]))

    def nothing(accumulator: object, *numbers: int) -> None:
        pass

    one = Sequence(_request(1, [1], 1), 1)
    one.pages = [1]
    rows, noted = [one] * sequence_count, list[int]()
    times = []
    for calls in steps[1:]:
        began = time.perf_counter()
        for numbers in calls:
            nothing(None, *numbers)
        for sequence in rows:
            noted += sequence.number, sequence.computed, sequence.pages[-1]
        times.append(time.perf_counter() - began)
        noted.clear()
    return times


def _id_times(sequence_count: int) -> list[float]:
    """Seconds that reports of every rank take in the inbox longer for the copies of a step that they name."""
    results: list[tuple[TransferResult, ...]] = []
    hierarchy_times(sequence_count, lambda plan, entry: results.append(entry.settled))
    times = []
    spent = dict[bool, float]()
    inbox = Sequencer(Scheduler(_capacity(1, 1)), world_size=STAGES, queued_max=1)
    for step, transfers in enumerate(results[1:], start=1):  # The first backs up all prompts.
        for named in (False, True):
            reports = [
                Report(
                    rank=rank,
                    watermark=step,
                    finished=(FinishedStep(step=step),),
                    transfers=transfers if named else (),
                )
                for rank in range(STAGES)
            ]
            began = time.perf_counter()
            for report in reports:
                inbox.report(report)
            spent[named] = time.perf_counter() - began
        times.append(max(spent[True] - spent[False], 0.0))
    return times


def _comparison_times() -> list[float]:
    """Seconds of one comparison of two digests, each taken from a value of its own, as a follower does."""
    draw = Random(3)
    times = []
    for _ in range(DECODE_STEPS):
        digest = draw.getrandbits(64)
        mine, theirs = Plan(step=1, digest=digest), Plan(step=1, digest=int(str(digest)))
        began = time.perf_counter()
        parted = mine.digest != theirs.digest
        times.append(time.perf_counter() - began)
        assert not parted
    return times


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def _capacity(pages: int, running: int, *, host_pages: int = 0) -> Capacity:
    return Capacity(
        page_size=PAGE_SIZE,
        device_pages=pages,
        host_pages=host_pages,
        max_running_requests=running,
        chunk_tokens=2**30,
        depth=1,
        context_length=2**30,
    )


def _ids(draw: Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def _request(number: int, prompt: list[int], new: int) -> Request:
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0)
    return Request(request_id=number, rid=str(number), prompt_ids=tuple(prompt), sampling=sampling)


def _insert(cache: RadixCache, ids: list[int]) -> None:
    """Put pages straight into the tree, held by nobody else."""
    allocator, key = cache.device.allocator, pack(ids)
    pages = allocator.allocate(len(ids) // PAGE_SIZE)
    cache.lock(cache.root)
    end, _ = cache.extend(cache.root, b"", key, pages, 0)
    cache.unlock(end)
    allocator.release(pages)


def _timed(scheduler: Scheduler, entry: Entry) -> tuple[Plan, float]:
    began = time.perf_counter()
    plan = scheduler.apply(entry)
    return plan, time.perf_counter() - began


def _show(title: str, rows: dict[str, list[float]]) -> None:
    table = Table(title, "median us", "90 % us")
    for name, times in rows.items():
        table.add_row(name, *(f"{_percentile(times, percent) * 1e6:.1f}" for percent in (50, 90)))
    Console().print(table)


def main() -> None:
    """Measure and print the tables."""
    cases: dict[str, Callable[[], list[float]]] = {
        "decode, 16 sequences of 2,000 tokens": lambda: decode_times(16),
        "decode, 64 sequences of 2,000 tokens": lambda: decode_times(64),
        "admit 2,080, 2,048 cached in 1 node": lambda: admission_times(prefix_nodes=1, evict=False),
        "admit 2,080, 2,048 cached in 128 nodes": lambda: admission_times(prefix_nodes=128, evict=False),
        "admit 2,080, cold, 130 pages to evict": lambda: admission_times(prefix_nodes=1, evict=True),
    }
    _show("one step", {name: measure() for name, measure in track(cases.items(), description="measuring")})
    _show("agreement in a decode step, 16 sequences, host tier", agreement_times(16))
    _show("transport of such a step's entry", transport_times(16))


if __name__ == "__main__":
    main()
