"""Ways in which one replica can part from the others: a word of memory flips, an entry is misheard, a set is iterated.

Each fault takes one rank's replica and the entry that it is about to apply, and returns the entry that it applies
instead. A fault that finds nothing to spoil leaves everything as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import msgspec

from engine.mem_cache.hicache import Copy
from engine.mem_cache.tier import DEVICE, HOST
from engine.scheduler.scheduler import Scheduler
from engine.types import Entry, TransferResult

Fault = Callable[[Scheduler, Entry, Random], Entry]


def _fewer_pages(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The known fault: this rank has one page less than the others."""
    if entry.step == 1:
        scheduler.allocator.page_count -= 1
        scheduler.allocator._free.pop()
    return entry


def _fewer_host_pages(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The known fault of fixed budgets: this rank's host tier has one page less than the others'."""
    host = scheduler.cache.host.allocator
    if entry.step == 1 and host.page_count:
        host.page_count -= 1
        host._free.pop()
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
    """The page that a sequence writes next becomes another, which several hold."""
    shared = [page for page, holders in enumerate(scheduler.allocator.references) if holders > 1]
    for sequence in scheduler.running:
        others = [page for page in shared if page not in sequence.pages]
        if len(sequence.ids) < len(sequence.pages) * scheduler.capacity.page_size and others:
            sequence.pages[-1] = draw.choice(others)
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


# ---- copies ----


def _under_way(scheduler: Scheduler, entry: Entry) -> list[Copy]:
    """Copies that go on after this entry."""
    ended = [result.transfer_id for result in entry.settled]
    return [copy for number, copy in scheduler.hicache.under_way.items() if number not in ended]


def _completion_early(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """This rank's copy has ended, and it does not wait until the others' have."""
    for copy in _under_way(scheduler, entry)[:1]:
        result = TransferResult(transfer_id=copy.transfer.transfer_id, ok=True)
        return msgspec.structs.replace(entry, settled=(*entry.settled, result))
    return entry


def _completion_lost(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    return msgspec.structs.replace(entry, settled=entry.settled[1:])


def _failure_unheard(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """Another rank's copy has failed, this rank's has not, and it counts what it has."""
    settled = tuple(msgspec.structs.replace(result, ok=True) for result in entry.settled)
    return msgspec.structs.replace(entry, settled=settled)


def _counts_agreed(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """Ranks agree how many copies of a kind have ended, not which: this rank takes another one."""
    if entry.settled:
        first, *rest = entry.settled
        kind = scheduler.hicache.under_way[first.transfer_id].transfer.kind
        for copy in _under_way(scheduler, entry):
            if copy.transfer.kind == kind:
                other = msgspec.structs.replace(first, transfer_id=copy.transfer.transfer_id)
                return msgspec.structs.replace(entry, settled=(other, *rest))
    return entry


def _freed_at_an_abort(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The pages of a load are let go with the request that wanted it, while it goes on."""
    for abort in entry.aborts:
        sequence = scheduler.live.get(abort.request_id)
        for copy in _under_way(scheduler, entry):
            if sequence is not None and sequence.loading == copy.transfer.transfer_id:
                scheduler.allocator.release(copy.transfer.device_pages)
    return entry


def _copy_unlocked(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The path of a copy can be evicted while it runs."""
    for copy in _under_way(scheduler, entry)[:1]:
        scheduler.cache._change_locks(copy.node, scheduler.cache.root, -1)
    return entry


def _host_free_list_turned(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    scheduler.cache.host.allocator._free.rotate(1)
    return entry


def _mirrors_first(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    """The host gives up what the device holds too before anything else, and not after."""
    scheduler.cache.host._rank = lambda node: int(len(node.held[HOST]) > len(node.held[DEVICE]))
    return entry


def _wishes_lost(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    scheduler.hicache._wanted.clear()
    return entry


def _other_write_policy(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    copies = scheduler.hicache
    copies._policy = "write_back" if copies._policy == "write_through" else "write_through"
    return entry


def _transfers_misnumbered(scheduler: Scheduler, entry: Entry, draw: Random) -> Entry:
    scheduler.hicache.next_transfer_id += 1
    return entry


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
        _fewer_host_pages,
        _completion_early,
        _completion_lost,
        _failure_unheard,
        _counts_agreed,
        _freed_at_an_abort,
        _copy_unlocked,
        _host_free_list_turned,
        _mirrors_first,
        _wishes_lost,
        _other_write_policy,
        _transfers_misnumbered,
    )
}
