"""What replicas compare beside the digest: the counters of one scheduler, by name.

Reads a scheduler and changes nothing but the chains of its event accumulators, which are folded once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.scheduler.digest import Accumulator

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Scheduler

STATE_FIELDS = (
    "step", "inputs", "arrived", "waiting", "running", "ended", "steps in flight",
    "pages available", "pages evictable", "pages protected", "pages pending",
    "host pages available", "host pages evictable", "host pages protected",
    "tree clock", "next node", "retractions", "evictions", "demotions", "finished",
    "copies under way", "next copy", "host evictions", "mirrors dropped",
    "pages backed up", "pages loaded", "copies failed",
    "allocator events", "host allocator events", "tree events", "copy events", "rows",
)  # fmt: skip
"""Names of the state vector's numbers, causes before effects: the first that differs is what parted first."""


class Events:
    """The chains of hashes over what happened, one for each part of the state."""

    def __init__(self) -> None:
        self.inputs, self.rows, self.tree, self.copies = (Accumulator() for _ in range(4))
        self.device_allocator, self.host_allocator = Accumulator(), Accumulator()


def state_vector(scheduler: Scheduler, *, host_counts: bool) -> tuple[int, ...]:
    """The numbers that `STATE_FIELDS` names, as of the step applied last; each is less than 2^64.

    Without `host_counts` those that follow from the host's capacity alone are 0, so that replicas whose capacities
    differ part only where they decide differently.
    """
    cache, copies, events = scheduler.cache, scheduler.hicache, scheduler.events
    device, host = cache.device, cache.host
    host_numbers = (
        host.allocator.available,
        host.pages_unlocked,
        host.allocator.page_count - host.allocator.available - host.pages_unlocked,
    )
    return (
        scheduler.step,
        events.inputs.fold(),
        scheduler.arrived,
        len(scheduler.waiting),
        len(scheduler.running),
        len(scheduler.ended),
        len(scheduler.in_flight),
        device.allocator.available,
        device.pages_unlocked,
        device.allocator.page_count - device.allocator.available - device.pages_unlocked,
        device.allocator.pending,
        *(host_numbers if host_counts else (0, 0, 0)),
        cache.clock,
        cache.next_node_id,
        scheduler.retractions,
        device.pages_evicted,
        device.pages_kept,
        scheduler.finished,
        len(copies.under_way),
        copies.next_transfer_id,
        host.pages_evicted - host.pages_kept,
        host.pages_kept,
        copies.pages_backed_up,
        copies.pages_loaded,
        copies.failures,
        events.device_allocator.fold(),
        events.host_allocator.fold(),
        events.tree.fold(),
        events.copies.fold(),
        events.rows.fold(),
    )


def counters(scheduler: Scheduler) -> dict[str, int]:
    """Totals since the start, for people; equal on all ranks."""
    device, host, copies = scheduler.cache.device, scheduler.cache.host, scheduler.hicache
    return {
        "arrived": scheduler.arrived,
        "finished": scheduler.finished,
        "retractions": scheduler.retractions,
        "evicted_pages": device.pages_evicted,
        "demoted_pages": device.pages_kept,
        "backed_up_pages": copies.pages_backed_up,
        "loaded_pages": copies.pages_loaded,
        "host_evicted_pages": host.pages_evicted - host.pages_kept,
        "dropped_mirror_pages": host.pages_kept,
        "failed_copies": copies.failures,
        "copies_under_way": len(copies.under_way),
    }
