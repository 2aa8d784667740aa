"""What a run of the cluster meets: counted, so that a test can demand that nothing of it was missed by all seeds.

Looks at the leader's replica before and after each entry. It never changes anything and asserts nothing.
"""

from __future__ import annotations

from collections import Counter

from engine.mem_cache.tier import DEVICE
from engine.scheduler import policy
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence, State
from engine.types import Entry, Plan


class Sights:
    """Counts what happens to the copies of one replica and to those who wait for them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.seen: Counter[str] = Counter()
        self._scheduler = scheduler
        self._loading: dict[int, Sequence] = {}

    def before(self, entry: Entry) -> None:
        """An entry is about to be applied."""
        scheduler, seen = self._scheduler, self.seen
        self._loading = dict(scheduler.loading)
        for result in entry.settled:
            copy = scheduler.hicache.under_way[result.transfer_id]
            kind = copy.transfer.kind
            seen[f"{kind}s that failed"] += not result.ok
            if kind == "load":
                seen["loads that nobody waited for"] += result.transfer_id not in scheduler.loading
                below = [node for depth, node in scheduler.cache.path(copy.node) if depth >= copy.start]
                seen["loads of what was computed meanwhile"] += any(node.held[DEVICE] for node in below)

    def after(self, entry: Entry, plan: Plan) -> None:
        """It has been applied, and has led to `plan`."""
        scheduler, seen = self._scheduler, self.seen
        under_way = scheduler.hicache.under_way
        for transfer in plan.transfers:
            seen[f"{transfer.kind}s"] += 1
            seen["write-backs"] += (
                transfer.kind == "backup" and scheduler.capacity.write_policy == "write_back"
            )
        for number, sequence in self._loading.items():
            if number in under_way and sequence.loading != number:
                seen["aborted while loading"] += sequence.state is State.ENDED
        if any(copy.transfer.kind == "load" for copy in under_way.values()):
            seen["waits for another's copy"] += sum(self._waits_for_copy(s) for s in scheduler.waiting)

    def _waits_for_copy(self, sequence: Sequence) -> bool:
        size = self._scheduler.capacity.page_size
        pages_max = sequence.cache_pages_max(size)
        found = self._scheduler.cache.peek(sequence.salt, bytes(sequence.key), pages_max)
        return found.in_transfer and policy.pages_to_load(found.host_pages, size) > 0
