"""The hierarchy: which pages are copied between device and host, and when the copies count.

Owns the copies that are under way and the wish for backups; the tree and the allocators of both tiers are shared with
the scheduler. A copy is planned here, worked by every rank at its own pace, and takes effect in `settle`, when the log
says that all ranks have finished it. Until then its path is locked in both tiers, its target pages belong to it alone,
and what it was to bring is not there: a failed, slow or abandoned copy can neither be seen nor be written over.

    backup:  tree's device pages  -->  the copy's host pages    -- settled -->  tree's host pages
    load:    tree's host pages    -->  the copy's device pages  -- settled -->  tree's device pages

Only one copy at a time covers a node, and a path is backed up from its top, so that what the host holds of a path is
always its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.mem_cache.radix_cache import RadixCache
from engine.mem_cache.tier import DEVICE, HOST, Node
from engine.scheduler.digest import Accumulator
from engine.types import Transfer, TransferResult, WritePolicy

_BACKUP, _LOAD, _SETTLED = range(1, 4)


@dataclass(slots=True)
class Copy:
    """A transfer under way: pages [start, start + count) of the path to `node`."""

    transfer: Transfer
    node: Node
    start: int


class HiCache:
    """The books of all copies of one replica. Inert when the host tier has no pages."""

    def __init__(self, cache: RadixCache, write_policy: WritePolicy, events: Accumulator) -> None:
        self.under_way: dict[int, Copy] = {}
        self.next_transfer_id = 1
        self.pages_backed_up = self.pages_loaded = self.failures = 0
        self._cache = cache
        self._policy = write_policy
        self._events = events
        self._enabled = cache.host.allocator.page_count > 0
        self._wanted: dict[int, Node] = {}
        self._planned: list[Transfer] = []

    # ---- what the scheduler asks for ----

    def inserted(self, node: Node) -> None:
        """The path to `node` has been computed for the first time, by the step that is planned now."""
        if self._enabled and self._policy == "write_through":
            self._wanted[node.node_id] = node

    def matched(self, node: Node) -> None:
        """The path to `node` has been found on the device."""
        if self._enabled and self._policy != "write_back" and node.parent is not None:
            self._wanted[node.node_id] = node

    def take_device_pages(self, count: int) -> list[int] | None:
        """Give out device pages, evicting what is unlocked. None: not before copies under way have settled.

        With write_back, pages that the host does not hold are copied there first, and go when that has settled, well
        or not. The caller has checked that unlocked pages suffice.
        """
        cache, aside = self._cache, list[Node]()
        short = count - cache.device.allocator.available
        coming, writes_back = 0, self._enabled and self._policy == "write_back"
        if writes_back:
            backups = [copy for copy in self.under_way.values() if copy.transfer.kind == "backup"]
            coming = sum(len(copy.transfer.host_pages) for copy in backups if copy.node.locks == 1)
        while short > coming and (node := cache.device.coldest()) is not None:
            unsaved = len(node.held[DEVICE]) - len(node.held[HOST])
            if unsaved > 0 and writes_back:
                if self._is_busy(node):
                    aside.append(node)
                    continue
                if self._back_up(node, whole=True):
                    coming += len(node.held[DEVICE])
                    continue
            short -= cache.trim(node, cache.device, short)
        for node in aside:
            cache.device.queue(node)
        if short > 0:
            assert self.under_way, f"{count} device pages asked, {short} short, and nothing is under way"
            return None
        return cache.device.allocator.allocate(count)

    def load(self, node: Node, host_pages: list[int], device_pages: list[int]) -> int:
        """Copy the last pages of the path to `node`, which the host alone holds, into pages of the caller, which become
        the copy's. Returns the transfer's id."""
        start = sum(each.page_count for _, each in self._cache.path(node)) - len(host_pages)
        return self._begin("load", node, start, device_pages, host_pages)

    def plan(self) -> tuple[Transfer, ...]:
        """The copies that begin in this step: loads asked for, and backups that are wanted and possible now."""
        for node_id, node in list(self._wanted.items()):
            if node.parent is None or not self._is_busy(node):
                del self._wanted[node_id]
                if node.parent is not None:
                    self._back_up(node, whole=False)
        planned, self._planned = self._planned, []
        return tuple(planned)

    # ---- what the log says ----

    def settle(self, result: TransferResult) -> int:
        """All ranks have finished a copy: it counts, or, if it failed on any of them, it never was.

        Returns how many pages have come to the device.
        """
        cache = self._cache
        copy = self.under_way.pop(result.transfer_id, None)
        assert copy is not None, f"transfer {result.transfer_id} settled, but it is not under way"
        transfer, node = copy.transfer, copy.node
        self._events.note(_SETTLED, result.transfer_id, int(result.ok))
        loads = transfer.kind == "load"
        tier = cache.device if loads else cache.host
        pages = list(transfer.device_pages if loads else transfer.host_pages)
        # However nodes were split or have grown meanwhile, all their parts lie on the path and bear the mark.
        marked = [each for _, each in cache.path(node) if each.transfer_id == result.transfer_id]
        for each in marked:
            each.transfer_id = 0
        pages_loaded = len(pages) if loads and result.ok else 0
        self.pages_loaded += pages_loaded
        if result.ok:
            self.pages_backed_up += len(pages) - pages_loaded
            pages = cache.fill(node, copy.start, tier, pages)
        tier.allocator.release(pages)
        node.pins -= 1
        cache.unlock(node)
        if not result.ok:
            self.failures += 1
            if loads:  # What could not be read once is not tried again.
                cache.forget(marked[0], cache.host)
            elif self._policy == "write_back" and cache.device.is_leaf(node):
                # These pages were to leave the device; now they leave it without a copy.
                cache.trim(node, cache.device, len(node.held[DEVICE]) - len(node.held[HOST]))
        return pages_loaded

    # ---- inside ----

    def _back_up(self, node: Node, *, whole: bool) -> bool:
        """Begin to copy what the host lacks of the path to `node`, all of it or, unless `whole`, as much as fits."""
        cache = self._cache
        start, pages = self._unsaved(node)
        if not pages:
            return False
        cache.lock(node)  # Before room is made: its own ancestors must not be what goes.
        host = cache.host
        if not whole or len(pages) <= host.allocator.available + host.pages_unlocked:
            cache.evict(host, len(pages) - host.allocator.available)
            count = min(len(pages), host.allocator.available)
        else:
            count = 0
        if count:
            self._begin("backup", node, start, pages[:count], host.allocator.allocate(count))
        cache.unlock(node)
        return count > 0

    def _begin(
        self,
        kind: Literal["backup", "load"],
        node: Node,
        start: int,
        device_pages: list[int],
        host_pages: list[int],
    ) -> int:
        cache, number = self._cache, self.next_transfer_id
        self.next_transfer_id += 1
        transfer = Transfer(
            transfer_id=number,
            kind=kind,
            device_pages=tuple(device_pages),
            host_pages=tuple(host_pages),
        )
        cache.lock(node)
        node.pins += 1
        copy = Copy(transfer, node, start)
        self.under_way[number] = copy
        for depth, each in cache.path(node):
            if depth + each.page_count > start:
                assert not each.transfer_id, (
                    f"node {each.node_id} is covered by transfer {each.transfer_id} already"
                )
                each.transfer_id = number
        self._planned.append(transfer)
        event = _LOAD if kind == "load" else _BACKUP
        self._events.note(event, number, node.node_id, start, len(device_pages), *device_pages, *host_pages)
        return number

    def _unsaved(self, node: Node) -> tuple[int, list[int]]:
        """Where the host's part of the path to `node` ends, and the device pages from there on."""
        saved, pages = 0, list[int]()
        for _, each in self._cache.path(node):
            saved += len(each.held[HOST])
            pages += each.held[DEVICE][len(each.held[HOST]) :]
        return saved, pages

    def _is_busy(self, node: Node) -> bool:
        """Whether a copy covers a part of the path to `node` that the host does not hold yet."""
        while node.parent is not None and len(node.held[HOST]) < node.page_count:
            if node.transfer_id:
                return True
            node = node.parent
        return False
