"""Which pages are free, and how many holders every other page has.

Owns the free list and the reference counts, nothing else. A holder is the tree or one sequence's page table;
a page becomes free when its last holder lets go, and pages that a step in flight still names are let go when
that step retires. The free list is first in, first out, so page numbers follow from the history alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.scheduler.digest import Accumulator

_GIVEN, _FREED = 1, 2


class PageAllocator:
    """The books of one tier's pages, numbered 0 to `page_count` - 1."""

    def __init__(self, page_count: int, events: Accumulator) -> None:
        self.page_count = page_count
        self.references = [0] * page_count
        self._free = deque(range(page_count))
        self._pending: deque[tuple[int, int]] = deque()
        self._events = events

    @property
    def available(self) -> int:
        """Pages that can be given out now."""
        return len(self._free)

    @property
    def pending(self) -> int:
        """Pages that will be let go when the steps that name them retire."""
        return len(self._pending)

    def allocate(self, count: int) -> list[int]:
        """Give out `count` pages with one holder each. The caller has checked `available`."""
        assert count <= len(self._free), f"{count} pages asked, {len(self._free)} available"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            assert self.references[page] == 0, f"page {page} given out with {self.references[page]} holders"
            self.references[page] = 1
        if pages:
            self._events.note(_GIVEN, count, *pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add one holder to pages that are in use."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} is free and cannot be shared"
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each page; those without any become free, in this order."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} released, but it has no holder"
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)
                self._events.note(_FREED, page)

    def release_after(self, step: int, page: int) -> None:
        """Take one holder from a page once `step` has retired. Steps must come in order."""
        assert not self._pending or self._pending[-1][0] <= step, (
            f"step {step} is older than the last pending"
        )
        self._pending.append((step, page))

    def retire(self, step: int) -> None:
        """Let go of the pages that waited for `step` or an earlier one."""
        while self._pending and self._pending[0][0] <= step:
            self.release((self._pending.popleft()[1],))

    def free_pages(self) -> list[int]:
        """The free list in order, for recounts."""
        return list(self._free)

    def pending_pages(self) -> list[int]:
        """Pages whose holder waits for a step to retire, for recounts."""
        return [page for _, page in self._pending]
