"""Ways in which one replica can part from the others: a word of memory flips, an entry is misheard, a set is iterated.

Each fault takes one rank's replica and the entry that it is about to apply, and returns the entry that it applies
instead. A fault that finds nothing to spoil leaves everything as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import msgspec

from engine.scheduler.scheduler import Scheduler
from engine.types import Entry

Fault = Callable[[Scheduler, Entry, Random], Entry]


def _fewer_pages(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The known fault: this rank has one page less than the others."""
    if entry.step == 1:
        page = scheduler.allocator.free_pages()[-1]
        scheduler.allocator.page_count -= 1
        scheduler.allocator._free.remove(page)
    return entry


def _free_list_turned(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    scheduler.allocator._free.rotate(1)
    return entry


def _freed_early(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """A page is let go before its step has retired."""
    scheduler.allocator.retire(entry.step)
    return entry


def _retired_early(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """This rank thinks that an ended sequence's steps have retired."""
    for request_id, sequence in list(scheduler.ended.items()):
        sequence.in_flight = 0
        del scheduler.ended[request_id]
        scheduler._release(sequence)
    return entry


def _rows_shuffled(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The order of a set: what runs is the same on all ranks, in which order is not."""
    draw.shuffle(scheduler.running)
    return entry


def _waiting_shuffled(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    draw.shuffle(scheduler.waiting)
    return entry


def _clock_ahead(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    scheduler.cache.clock += 1
    return entry


def _recency_lost(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """Two leaves change places in the order of eviction."""
    leaves = [node for node in scheduler.cache.nodes() if not node.children]
    if len(leaves) > 1:
        one, other = draw.sample(leaves, 2)
        one.stamp, other.stamp = other.stamp, one.stamp
    return entry


def _lock_lost(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    if scheduler.running:
        scheduler.cache.lock(scheduler.running[0].node)
    return entry


def _page_table_flipped(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The last page of a sequence becomes another."""
    for sequence in scheduler.running:
        if sequence.pages:
            sequence.pages[-1] = (sequence.pages[-1] + 1) % scheduler.capacity.device_pages
            break
    return entry


def _counter_flipped(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    scheduler.retractions ^= 4
    return entry


def _chunk_smaller(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    chunk = scheduler.capacity.chunk_tokens
    scheduler.capacity = dataclasses.replace(scheduler.capacity, chunk_tokens=chunk - 1)
    return entry


def _more_running(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    slots = scheduler.capacity.max_running_requests
    scheduler.capacity = dataclasses.replace(scheduler.capacity, max_running_requests=slots + 1)
    return entry


def _growth_differs(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    growth = scheduler.capacity.growth_tokens
    scheduler.capacity = dataclasses.replace(scheduler.capacity, growth_tokens=growth ^ 16)
    return entry


def _abort_unheard(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    return msgspec.structs.replace(entry, aborts=())


def _token_misheard(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    retired = tuple(
        msgspec.structs.replace(step, tokens=tuple(token ^ 1 for token in step.tokens))
        for step in entry.retired
    )
    return msgspec.structs.replace(entry, retired=retired)


def _arrivals_swapped(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    return msgspec.structs.replace(entry, arrivals=entry.arrivals[::-1])


def _limit_misheard(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    arrivals = tuple(
        msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(
                request.sampling, max_new_tokens=max(request.sampling.max_new_tokens - 1, 1)
            ),
        )
        for request in entry.arrivals
    )
    return msgspec.structs.replace(entry, arrivals=arrivals)


FAULTS: dict[str, Fault] = {
    fault.__name__.removeprefix("_").replace("_", " "): fault
    for fault in (
        _fewer_pages,
        _free_list_turned,
        _freed_early,
        _retired_early,
        _rows_shuffled,
        _waiting_shuffled,
        _clock_ahead,
        _recency_lost,
        _lock_lost,
        _page_table_flipped,
        _counter_flipped,
        _chunk_smaller,
        _more_running,
        _growth_differs,
        _abort_unheard,
        _token_misheard,
        _arrivals_swapped,
        _limit_misheard,
    )
}
