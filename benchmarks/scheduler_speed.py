"""How long the pure half takes: `python -m benchmarks.scheduler_speed`.

Two questions. What does one decode step cost (entry -> plan, radix tree and digest included) for 16 and 64 sequences
with 2,000 tokens of context each? And what does it cost to admit a prompt of 2,080 tokens, 2,048 of them cached, when
the tree has 65,536 nodes: with the prefix in one node, with a node for each of its pages, and cold with every new page
to be won by eviction? Numbers are medians and 90th percentiles in microseconds, of one thread.
"""

from __future__ import annotations

import time
from random import Random

from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.mem_cache.radix_cache import RadixCache, pack
from engine.scheduler.scheduler import Scheduler
from engine.types import Abort, Capacity, Entry, Plan, Request, RetiredStep, SamplingParams

PAGE_SIZE = 16
CONTEXT_TOKENS = 2000
DECODE_STEPS = 320
PREFIX_TOKENS, PROMPT_TOKENS = 2048, 2080
TREE_NODES = 65_536
ADMISSIONS = 200
VOCABULARY = 50_000


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


def _capacity(pages: int, running: int) -> Capacity:
    return Capacity(
        page_size=PAGE_SIZE,
        device_pages=pages,
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
    allocator, key = cache._allocator, pack(ids)
    pages = allocator.allocate(len(ids) // PAGE_SIZE)
    cache.lock(cache.root)
    end, _ = cache.extend(cache.root, b"", key, pages, 0)
    cache.unlock(end)
    allocator.release(pages)


def _timed(scheduler: Scheduler, entry: Entry) -> tuple[Plan, float]:
    began = time.perf_counter()
    plan = scheduler.apply(entry)
    return plan, time.perf_counter() - began


def main() -> None:
    """Measure and print the table."""
    cases = (
        ("decode, 16 sequences of 2,000 tokens", lambda: decode_times(16)),
        ("decode, 64 sequences of 2,000 tokens", lambda: decode_times(64)),
        ("admit 2,080, 2,048 cached in 1 node", lambda: admission_times(prefix_nodes=1, evict=False)),
        ("admit 2,080, 2,048 cached in 128 nodes", lambda: admission_times(prefix_nodes=128, evict=False)),
        ("admit 2,080, cold, 130 pages to evict", lambda: admission_times(prefix_nodes=1, evict=True)),
    )
    table = Table("one step", "median us", "90 % us")
    for name, measure in track(cases, description="measuring"):
        times = sorted(measure())
        median, late = times[len(times) // 2], times[len(times) * 9 // 10]
        table.add_row(name, f"{median * 1e6:.0f}", f"{late * 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
