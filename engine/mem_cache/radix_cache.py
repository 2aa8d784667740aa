"""The radix cache: which prefixes are computed, and in which pages they lie.

A compressed tree whose edges are whole pages of token ids. Owns the nodes, their locks, the logical clock and the
order of eviction; pages themselves belong to the allocator, where the tree is one holder of each of its pages.

    root --[salt + page 0 | page 1]--> node --[page 2]--> node        key:   4 bytes per token id
                                        |                             pages: one page number per page of the key
                                        +--[page 2' | page 3']--> node

A node that is locked (a sequence's path runs through it) is never evicted. A node's path holds at least as many
locks as the node itself. Time is one tick per touch; a path is touched from its end to the root, so that a prefix
is always more recent than what follows it. Nothing here knows requests, steps in flight or bytes of memory.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.mem_cache.allocator import PageAllocator
from engine.scheduler.digest import Accumulator

TOKEN_BYTES = 4
_ADDED, _GROWN, _SPLIT, _TRIMMED, _REMOVED, _MATCHED, _LOCKED, _UNLOCKED, _FLUSHED = range(1, 10)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as a key: 4 bytes each, so that slices compare at once and ids never collide."""
    return array("I", token_ids).tobytes()


class Node:
    """A run of pages that every prompt through it shares. Only `RadixCache` changes it."""

    __slots__ = (
        "children",
        "edge",
        "filled_step",
        "fresh_from",
        "key",
        "locks",
        "node_id",
        "pages",
        "parent",
        "queued",
        "stamp",
    )

    def __init__(self, node_id: int, parent: Node | None, edge: bytes, key: bytes, pages: list[int]) -> None:
        self.node_id = node_id
        self.parent = parent
        self.edge = edge
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.stamp = 0
        self.filled_step = 0
        self.fresh_from = 0  # Pages from here on were filled by `filled_step`, those before by earlier steps.
        self.queued = False


@dataclass(frozen=True, slots=True)
class Peek:
    """What a match would find, found without changing anything."""

    pages: int
    fresh_pages: int
    """How many of them, the last ones, are filled by the step asked about and can be read only after it."""
    evictable_pages: int
    """How many of all are unlocked now, and would stop being evictable."""


class RadixCache:
    """The tree of one tier of pages."""

    def __init__(self, page_size: int, allocator: PageAllocator, events: Accumulator) -> None:
        self.page_size = page_size
        self.root = Node(0, None, b"", b"", [])
        self.clock = 0
        self.next_node_id = 1
        self.pages_total = 0
        self.pages_unlocked = 0
        self.pages_evicted = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._allocator = allocator
        self._events = events
        self._leaves: list[tuple[int, int, Node]] = []

    # ---- reading ----

    def peek(self, salt: bytes, key: bytes, pages_max: int, step: int = -1) -> Peek:
        """How much of `key` the tree holds, at most `pages_max` pages; `step` is the one whose pages count as fresh.

        Changes nothing.
        """
        pages = fresh = unlocked = 0
        for node, taken in self._walk(self.root, salt, key, pages_max):
            pages += taken
            fresh += max(taken - node.fresh_from, 0) if node.filled_step == step else 0
            unlocked += taken if node.locks == 0 else 0
        return Peek(pages, fresh, unlocked)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first, in the order in which they were added to their parent."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack += reversed(node.children.values())

    # ---- matching and inserting ----

    def match(self, salt: bytes, key: bytes, pages_max: int) -> tuple[Node, list[int]]:
        """Find the longest prefix of `key`, at most `pages_max` pages, and touch it.

        Returns the node where it ends (the root when there is none) and its pages. A match that ends inside a node
        splits it, so that recency stays exact to the page.
        """
        end, pages = self.root, list[int]()
        for node, taken in self._walk(self.root, salt, key, pages_max):
            end = self._split(node, taken) if taken < len(node.pages) else node
            pages += end.pages
        self._touch_path(end)
        self._events.note(_MATCHED, end.node_id, len(pages))
        return end, pages

    def extend(
        self, node: Node, salt: bytes, key: bytes, pages: list[int], step: int
    ) -> tuple[Node, list[int]]:
        """Put computed pages behind `node`, which the caller has locked, and move the caller's lock to their end.

        `key` holds the ids of `pages`. Pages whose ids the tree has already are not taken: the tree's own come back
        in their place. Returns the new end, locked, and the pages that now stand for `key`. `step` filled them.
        """
        end, held = node, list[int]()
        for child, taken in self._walk(node, salt, key, len(pages)):
            end = self._split(child, taken) if taken < len(child.pages) else child
            held += end.pages
        rest = pages[len(held) :]
        if rest:
            self._allocator.hold(rest)
            self.pages_total += len(rest)
            rest_key = key[len(held) * self._page_bytes :]
            if end is node and node.locks == 1 and not node.children and node.parent is not None:
                # Nobody else ends here, so the node can grow: one long answer stays one node.
                node.fresh_from = len(node.pages)
                node.key += rest_key
                node.pages += rest
                self._events.note(_GROWN, node.node_id, len(rest), rest[0])
            else:
                end = self._add(end, salt, rest_key, rest)
            end.filled_step = step
        self._relock(node, end)
        self._touch_path(end)
        return end, held + rest

    # ---- locks ----

    def lock(self, node: Node) -> None:
        """Protect the path from the root to `node` from eviction, once more."""
        self._events.note(_LOCKED, node.node_id)
        self._change_locks(node, self.root, +1)

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of this path."""
        self._events.note(_UNLOCKED, node.node_id)
        self._change_locks(node, self.root, -1)

    def _relock(self, start: Node, end: Node) -> None:
        """Lengthen a lock that ends at `start` so that it ends at `end`, below it."""
        self._change_locks(end, start, +1)

    def _change_locks(self, node: Node, above: Node, change: int) -> None:
        while node is not above:
            assert node.parent is not None, f"node {node.node_id} is not below node {above.node_id}"
            before = node.locks
            node.locks += change
            assert node.locks >= 0, f"node {node.node_id} was unlocked more often than locked"
            if before == 0:
                self.pages_unlocked -= len(node.pages)
            elif node.locks == 0:
                self.pages_unlocked += len(node.pages)
                self._queue(node)
            node = node.parent

    # ---- eviction ----

    def evict(self, count: int) -> int:
        """Give up to `count` unlocked pages back (none if it is not positive), the least recent leaf first, each
        from its tail. Returns how many."""
        evicted = 0
        while evicted < count and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.locks or node.children:
                continue
            if node.stamp != stamp:
                self._queue(node)
                continue
            taken = min(count - evicted, len(node.pages))
            self._trim(node, taken)
            evicted += taken
        self.pages_evicted += evicted
        return evicted

    def flush(self) -> int:
        """Forget everything. Nothing may be locked. Returns how many pages were held."""
        assert self.pages_unlocked == self.pages_total, "flushed while a path is locked"
        flushed = self.pages_total
        for node in list(self.nodes()):
            self._allocator.release(node.pages)
            node.parent = None
        self.root.children = {}
        self._leaves = []
        self.pages_total = self.pages_unlocked = 0
        self._events.note(_FLUSHED, flushed)
        return flushed

    # ---- inside ----

    def _walk(self, node: Node, salt: bytes, key: bytes, pages_max: int) -> Iterator[tuple[Node, int]]:
        """Yield (node, pages of it that `key` shares) from below `node` down; only the last may be shared in part.

        The next child is looked up after the caller has dealt with the last one, and only behind a whole node.
        """
        width, position, end = self._page_bytes, 0, min(len(key) // self._page_bytes, pages_max)
        while position < end:
            first = key[position * width : (position + 1) * width]
            child = node.children.get(salt + first if node is self.root else first)
            if child is None:
                return
            length = min(len(child.pages), end - position)
            shared = _common_pages(child.key, key, position, length, width)
            node_pages = len(child.pages)
            yield child, shared
            if shared < node_pages:
                return
            node = child
            position += shared

    def _add(self, parent: Node, salt: bytes, key: bytes, pages: list[int]) -> Node:
        first = key[: self._page_bytes]
        edge = salt + first if parent is self.root else first
        assert edge not in parent.children, f"node {parent.node_id} has a child for this page already"
        node = Node(self.next_node_id, parent, edge, key, list(pages))
        self.next_node_id += 1
        parent.children[edge] = node
        self.pages_unlocked += len(pages)
        self._queue(node)
        self._events.note(_ADDED, node.node_id, parent.node_id, len(pages), pages[0])
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """Cut a node after `pages` pages. The node keeps its end, so whoever locked it still ends there.

        Returns the new upper node, which takes over the locks and the recency of the one it was cut from.
        """
        assert 0 < pages < len(node.pages) and node.parent is not None, (
            f"cut {pages} of {len(node.pages)} pages"
        )
        cut = pages * self._page_bytes
        upper = Node(self.next_node_id, node.parent, node.edge, node.key[:cut], node.pages[:pages])
        self.next_node_id += 1
        upper.locks, upper.stamp, upper.filled_step = node.locks, node.stamp, node.filled_step
        upper.fresh_from, node.fresh_from = min(node.fresh_from, pages), max(node.fresh_from - pages, 0)
        node.parent.children[node.edge] = upper
        node.key, node.pages = node.key[cut:], node.pages[pages:]
        node.parent, node.edge = upper, node.key[: self._page_bytes]
        upper.children[node.edge] = node
        self._events.note(_SPLIT, upper.node_id, node.node_id, pages)
        return upper

    def _trim(self, node: Node, count: int) -> None:
        """Drop the last `count` pages of an unlocked leaf, and the leaf itself when nothing is left."""
        dropped = node.pages[-count:]
        dropped.reverse()
        del node.pages[-count:]
        node.key = node.key[: len(node.pages) * self._page_bytes]
        self.pages_total -= count
        self.pages_unlocked -= count
        self._allocator.release(dropped)
        if node.pages:
            self._events.note(_TRIMMED, node.node_id, count)
            self._queue(node)
            return
        assert node.parent is not None
        self._events.note(_REMOVED, node.node_id, count)
        del node.parent.children[node.edge]
        self._queue(node.parent)
        node.parent = None

    def _touch_path(self, node: Node) -> None:
        while node.parent is not None:
            self.clock += 1
            node.stamp = self.clock
            node = node.parent

    def _queue(self, node: Node) -> None:
        """Remember a node that may now be evicted. Stamps only grow, so a stale one is put right when it comes up."""
        if not node.queued and not node.locks and not node.children and node.parent is not None:
            node.queued = True
            heapq.heappush(self._leaves, (node.stamp, node.node_id, node))


def _common_pages(node_key: bytes, key: bytes, position: int, length: int, width: int) -> int:
    """How many of the first `length` pages of a node equal those of `key` from page `position` on."""
    start = position * width
    if node_key[: length * width] == key[start : start + length * width]:
        return length
    low, high = 0, length - 1  # The first `low` pages are equal; among the first `high` + 1 one differs.
    while low < high:
        middle = (low + high + 1) // 2
        if node_key[: middle * width] == key[start : start + middle * width]:
            low = middle
        else:
            high = middle - 1
    return low
