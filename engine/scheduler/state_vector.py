"""What stands behind a digest: the counters and events of one scheduler at one step, by name.

Reads a scheduler and changes nothing but its accumulators, which it empties once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.scheduler.digest import Accumulator, hash_events

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Scheduler

STATE_FIELDS = (
    "inputs",
    "step", "arrived", "waiting", "running", "ended", "steps in flight",
    "pages available", "pages evictable", "pages protected", "pages pending",
    "host pages available", "host pages evictable", "host pages protected",
    "tree clock", "next node", "retractions", "evictions", "demotions", "finished",
    "copies under way", "next copy", "host evictions", "mirrors dropped",
    "pages backed up", "pages loaded", "copies failed",
    "allocator events", "host allocator events", "tree events", "copy events", "rows",
)  # fmt: skip
"""Names of the state's numbers, causes before effects: the first that differs is what parted first."""


class Events:
    """What happened in the current step, one accumulator for each part of the state."""

    def __init__(self) -> None:
        self.inputs, self.rows, self.tree, self.copies = (Accumulator() for _ in range(4))
        self.device_allocator, self.host_allocator = Accumulator(), Accumulator()

    def take(self) -> tuple[list[int], ...]:
        """The step's events, in the order of `STATE_FIELDS`."""
        parts = self.inputs, self.device_allocator, self.host_allocator, self.tree, self.copies, self.rows
        return tuple([part.take() for part in parts])


@dataclass(frozen=True, slots=True)
class State:
    """All that a step's digest covers beside the digest before it."""

    counters: tuple[int, ...]
    events: tuple[list[int], ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that `STATE_FIELDS` names, events as hashes; each is less than 2^64."""
        inputs, *others = map(hash_events, self.events)
        return inputs, *self.counters, *others


def take_state(scheduler: Scheduler, *, host_counts: bool) -> State:
    """The state as of the step that has just been planned.

    Without `host_counts` the numbers that follow from the host's capacity alone are 0, so that replicas whose
    capacities differ part only where they decide differently.
    """
    cache, copies = scheduler.cache, scheduler.hicache
    device, host = cache.device, cache.host
    device_free, host_free = device.allocator.available, host.allocator.available
    host_held = host.allocator.page_count - host_free - host.pages_unlocked
    counters = (
        scheduler.step,
        scheduler.arrived,
        len(scheduler.waiting),
        len(scheduler.running),
        len(scheduler.ended),
        len(scheduler.in_flight),
        device_free,
        device.pages_unlocked,
        device.allocator.page_count - device_free - device.pages_unlocked,
        device.allocator.pending,
        *((host_free, host.pages_unlocked, host_held) if host_counts else (0, 0, 0)),
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
    )
    return State(counters, scheduler.events.take())


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
