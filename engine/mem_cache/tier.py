"""One tier of the radix cache: what the tree holds in it, and in which order it gives that back.

A `Node` is a run of pages; each tier holds the first of them, perhaps none. A `Tier` owns its counts and its order of
eviction, never the shape of the tree: `radix_cache.py` adds, splits and removes nodes.
"""

from __future__ import annotations

import heapq

from engine.mem_cache.allocator import PageAllocator
from engine.types import Books

DEVICE, HOST = 0, 1
"""The tiers, as indices of what a node keeps for each."""
_NOT_QUEUED = 2


class Node:
    """A run of pages that every prompt through it shares.

    The tree changes its place, key and locks, a `Tier` what it holds, and `HiCache` the marks of copies.
    """

    __slots__ = (
        "branches",
        "children",
        "edge",
        "filled_step",
        "fresh_from",
        "held",
        "key",
        "locks",
        "node_id",
        "parent",
        "pins",
        "queued",
        "stamp",
        "transfer_id",
    )

    def __init__(self, node_id: int, parent: Node | None, edge: bytes, key: bytes) -> None:
        self.node_id = node_id
        self.parent = parent
        self.edge = edge
        self.key = key
        self.held: tuple[list[int], list[int]] = ([], [])
        # Children that hold pages, by tier.
        self.branches = [0, 0]
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        # Locks of copies that end here; unlike a sequence's, they do not mind if the node grows.
        self.pins = 0
        # The copy of some of its pages that is under way, if any.
        self.transfer_id = 0
        self.stamp = 0
        self.filled_step = 0
        # Device pages from here on were filled by `filled_step`, those before by earlier steps.
        self.fresh_from = 0
        # By tier: the rank under which it stands in the order of eviction.
        self.queued = [_NOT_QUEUED, _NOT_QUEUED]

    @property
    def page_count(self) -> int:
        """Pages of the run, each held by one tier at least."""
        return max(len(self.held[DEVICE]), len(self.held[HOST]))


class Tier:
    """The part of the tree in one tier: a tree of its own, which loses leaves, each page by page from its tail."""

    def __init__(self, index: int, allocator: PageAllocator, page_size: int) -> None:
        self.index = index
        self.allocator = allocator
        self.page_size = page_size
        self.pages_total = 0
        self.pages_unlocked = 0
        self.pages_evicted = 0
        self.pages_kept = 0  # Of the evicted ones, those that the other tier still held.
        self._leaves: list[tuple[int, int, int, Node]] = []

    def books(self) -> Books:
        """Where this tier's tokens are: free, in pages that could be freed now, and the rest."""
        total, available, evictable = self.allocator.page_count, self.allocator.available, self.pages_unlocked
        return Books(
            capacity=total * self.page_size,
            available=available * self.page_size,
            evictable=evictable * self.page_size,
            protected=(total - available - evictable) * self.page_size,
        )

    def put(self, node: Node, pages: list[int]) -> None:
        """Append pages to what this tier holds of a node. Whoever held them hands them over to the tree."""
        if not pages:
            return
        assert node.parent is not None, f"node {node.node_id} is not in the tree"
        if not node.held[self.index]:
            node.parent.branches[self.index] += 1
        node.held[self.index].extend(pages)
        self.pages_total += len(pages)
        if node.locks == 0:
            self.pages_unlocked += len(pages)

    def drop_tail(self, node: Node, count: int) -> int:
        """Take up to `count` of the last pages of an unlocked leaf out of this tier. Returns how many.

        On the host it stops where pages begin that the device holds too: other leaves may go before those.
        """
        held, other = node.held[self.index], node.held[1 - self.index]
        beyond = len(held) - len(other)
        count = min(count, beyond if self.index == HOST and beyond > 0 else len(held))
        dropped = held[-count:]
        dropped.reverse()
        del held[-count:]
        self.pages_total -= count
        self.pages_unlocked -= count
        self.pages_evicted += count
        self.pages_kept += count - min(max(beyond, 0), count)
        self.allocator.release(dropped)
        if not held:
            assert node.parent is not None, f"node {node.node_id} is not in the tree"
            node.parent.branches[self.index] -= 1
            self.queue(node.parent)
        return count

    def clear(self) -> None:
        """The tree has let go of everything."""
        self._leaves = []
        self.pages_total = self.pages_unlocked = 0

    def coldest(self) -> Node | None:
        """The unlocked leaf whose tail goes first: the least recent one; on the host, pages that the device holds too
        go after all others. The caller trims it, locks it or queues it again."""
        while self._leaves:
            rank, stamp, _, node = heapq.heappop(self._leaves)
            if node.queued[self.index] != rank:
                continue
            node.queued[self.index] = _NOT_QUEUED
            # A rank that falls is queued anew at once; ranks and stamps that have grown are put right here.
            if (self._rank(node), node.stamp) == (rank, stamp) and self.is_leaf(node):
                return node
            self.queue(node)
        return None

    def is_leaf(self, node: Node) -> bool:
        """Whether the last pages of a node can leave this tier now."""
        index = self.index
        return (
            not node.locks and not node.branches[index] and bool(node.held[index]) and node.parent is not None
        )

    def queue(self, node: Node) -> None:
        """Remember a node if its last pages may now leave this tier."""
        if self.is_leaf(node) and (rank := self._rank(node)) < node.queued[self.index]:
            node.queued[self.index] = rank
            heapq.heappush(self._leaves, (rank, node.stamp, node.node_id, node))

    def _rank(self, node: Node) -> int:
        return int(self.index == HOST and len(node.held[HOST]) <= len(node.held[DEVICE]))
