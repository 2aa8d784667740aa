"""The radix cache: which prefixes are computed, and in which pages of which tier they lie.

A compressed tree whose edges are whole pages of token ids. Owns the nodes, their locks, the logical clock and the
order of eviction; pages themselves belong to the allocators, where the tree is one holder of each of its pages.

    root --[salt + page 0 | page 1]--> node --[page 2]--> node        key:     4 bytes per token id
                                        |                             held[t]: page numbers of tier t
                                        +--[page 2' | page 3']--> node

In each tier a node holds its first pages, perhaps none: pages 0 to 4 on the device and 0 to 2 on the host, say. A tier
holds pages of a node only if it holds all those before them, on the whole path; so what a tier has is a tree, which
is evicted from its leaves, each page by page from its tail. A page that no tier holds any more is forgotten.

A node that is locked (a sequence's or a copy's path runs through it) is evicted from no tier. A node's path holds at
least as many locks as the node itself. Time is one tick per touch; a path is touched from its end to the root, so that
a prefix is always more recent than what follows it. Nothing here knows requests, steps in flight or bytes of memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.tier import DEVICE, HOST, Node, Tier
from engine.scheduler.digest import Accumulator

TOKEN_BYTES = 4
_ADDED, _GROWN, _SPLIT, _TRIMMED, _REMOVED, _MATCHED, _LOCKED, _UNLOCKED, _FLUSHED, _FILLED = range(1, 11)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as a key: 4 bytes each, so that slices compare at once and ids never collide."""
    return array("I", token_ids).tobytes()


@dataclass(frozen=True, slots=True)
class Peek:
    """What a match would find, found without changing anything."""

    pages: int
    """On the device."""
    fresh_pages: int
    """How many of them, the last ones, are filled by the step asked about and can be read only after it."""
    evictable_pages: int
    """How many of all are unlocked now, and would stop being evictable."""
    host_pages: int
    """How many more follow that only the host holds."""
    in_transfer: bool
    """Some of those are on their way to the device."""


class RadixCache:
    """The tree over all tiers."""

    def __init__(
        self,
        page_size: int,
        allocator: PageAllocator,
        events: Accumulator,
        host_allocator: PageAllocator | None = None,
    ) -> None:
        self.page_size = page_size
        self.root = Node(0, None, b"", b"")
        self.device = Tier(DEVICE, allocator, page_size)
        self.host = Tier(HOST, host_allocator or PageAllocator(0, events), page_size)
        self.tiers = (self.device, self.host)
        self.clock = 0
        self.next_node_id = 1
        self._page_bytes = page_size * TOKEN_BYTES
        self._events = events

    # ---- reading ----

    def peek(self, salt: bytes, key: bytes, pages_max: int, step: int = -1) -> Peek:
        """How much of `key` the tree holds, at most `pages_max` pages; `step` is the one whose pages count as fresh.

        Changes nothing.
        """
        pages = fresh = unlocked = host = 0
        in_transfer = False
        for node, taken in self._walk(self.root, salt, key, pages_max):
            here = min(taken, len(node.held[DEVICE]))
            pages += here
            fresh += max(here - node.fresh_from, 0) if node.filled_step == step else 0
            unlocked += here if node.locks == 0 else 0
            host += taken - here
            in_transfer |= taken > here and node.transfer_id != 0
        return Peek(pages, fresh, unlocked, host, in_transfer)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first, in the order in which they were added to their parent."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack += reversed(node.children.values())

    def path(self, node: Node) -> list[tuple[int, Node]]:
        """The nodes from the root's child to `node`, each with the number of pages before it."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        depth, path = 0, []
        for step in reversed(nodes):
            path.append((depth, step))
            depth += step.page_count
        return path

    # ---- matching and inserting ----

    def match(self, salt: bytes, key: bytes, pages_max: int) -> tuple[Node, list[int]]:
        """Find the longest prefix of `key` on the device, at most `pages_max` pages, and touch it.

        Returns the node where it ends (the root when there is none) and its pages. A match that ends inside a node
        splits it, so that recency stays exact to the page.
        """
        end, pages = self.root, list[int]()
        for node, taken in self._walk(self.root, salt, key, pages_max):
            here = min(taken, len(node.held[DEVICE]))
            if here == 0:
                break
            end = self._split_after(node, here)
            pages += end.held[DEVICE]
        self._touch_path(end)
        self._events.note(_MATCHED, end.node_id, len(pages))
        return end, pages

    def match_host(self, node: Node, salt: bytes, key: bytes, pages_max: int) -> tuple[Node, list[int]]:
        """Follow `key` behind `node`, where a match on the device ended, through pages that only the host holds.

        Returns where they end and the host's pages. The end is split off, so that a copy of them has its own node.
        """
        end, pages = node, list[int]()
        for child, taken in self._walk(node, salt, key, pages_max):
            assert not child.held[DEVICE], f"the match on the device stopped before node {child.node_id}"
            end = self._split_after(child, taken)
            pages += end.held[HOST]
        return end, pages

    def extend(
        self, node: Node, salt: bytes, key: bytes, pages: list[int], step: int
    ) -> tuple[Node, list[int]]:
        """Put computed pages behind `node`, which the caller has locked, and move the caller's lock to their end.

        `key` holds the ids of `pages`. Pages that the device has already are not taken: the tree's own come back in
        their place. Returns the new end, locked, and the pages that now stand for `key`. `step` filled them.
        """
        end, held = node, list[int]()
        for child, taken in self._walk(node, salt, key, len(pages)):
            end = self._split_after(child, taken)
            have = len(end.held[DEVICE])
            if have < taken:  # The host alone has the rest of this node; now the device has it too.
                self._take(end, pages[len(held) + have : len(held) + taken], step)
            held += end.held[DEVICE]
        rest = pages[len(held) :]
        if rest:
            rest_key = key[len(held) * self._page_bytes :]
            if end is node and node.locks - node.pins == 1 and not node.children and node.parent is not None:
                # No other sequence ends here, so the node can grow: one long answer stays one node.
                node.key += rest_key
                self._events.note(_GROWN, node.node_id, len(rest), rest[0])
            else:
                end = self._add(end, salt, rest_key)
            self._take(end, rest, step)
        self._change_locks(end, node, +1)
        self._touch_path(end)
        return end, held + rest

    def fill(self, node: Node, start: int, tier: Tier, pages: list[int]) -> list[int]:
        """Put copied pages into a tier: they are the pages from `start` on of the path to `node`, which is locked.

        The caller's hold on them passes to the tree. Returns those that the tier has got meanwhile in another way,
        still held by the caller.
        """
        surplus = list[int]()
        for depth, each in self.path(node):
            have, end = depth + len(each.held[tier.index]), min(depth + each.page_count, start + len(pages))
            if end > start:
                first = max(depth, start)
                assert have >= first, (
                    f"node {each.node_id}: pages from {first} on, but the tier ends at {have}"
                )
                new_from = min(have, end)
                surplus += pages[first - start : new_from - start]
                tier.put(each, pages[new_from - start : end - start])
        self._events.note(_FILLED, node.node_id, tier.index, start, len(pages), len(surplus))
        return surplus

    # ---- locks ----

    def lock(self, node: Node) -> None:
        """Protect the path from the root to `node` from eviction, once more."""
        self._events.note(_LOCKED, node.node_id)
        self._change_locks(node, self.root, +1)

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of this path."""
        self._events.note(_UNLOCKED, node.node_id)
        self._change_locks(node, self.root, -1)

    def _change_locks(self, node: Node, above: Node, change: int) -> None:
        while node is not above:
            assert node.parent is not None, f"node {node.node_id} is not below node {above.node_id}"
            before = node.locks
            node.locks += change
            assert node.locks >= 0, f"node {node.node_id} was unlocked more often than locked"
            if before == 0:
                self.device.pages_unlocked -= len(node.held[DEVICE])
                self.host.pages_unlocked -= len(node.held[HOST])
            elif node.locks == 0:
                self.device.pages_unlocked += len(node.held[DEVICE])
                self.host.pages_unlocked += len(node.held[HOST])
                self.device.queue(node)
                self.host.queue(node)
            node = node.parent

    # ---- eviction ----

    def evict(self, tier: Tier, count: int) -> int:
        """Give up to `count` unlocked pages back (none if it is not positive). Returns how many."""
        evicted = 0
        while evicted < count and (node := tier.coldest()) is not None:
            evicted += self.trim(node, tier, count - evicted)
        return evicted

    def trim(self, node: Node, tier: Tier, count: int) -> int:
        """Take up to `count` of the last pages of an unlocked leaf out of a tier. Returns how many.

        Pages that no tier holds any more are forgotten, and a node of which none is left with them.
        """
        parent = node.parent
        assert parent is not None, f"node {node.node_id} is not in the tree"
        count = tier.drop_tail(node, count)
        self._events.note(_TRIMMED, node.node_id, tier.index, count)
        node.key = node.key[: node.page_count * self._page_bytes]
        if not node.key:
            assert not node.children, f"node {node.node_id} vanishes, but has children"
            self._events.note(_REMOVED, node.node_id)
            del parent.children[node.edge]
            node.parent = None
        for each in self.tiers:
            each.queue(node)
        return count

    def forget(self, node: Node, tier: Tier) -> None:
        """Drop what a tier holds of `node` and of all below it, as far as it is unlocked."""
        below = [node]
        for each in below:
            below += each.children.values()
        for each in reversed(below):  # Children before their parents.
            while tier.is_leaf(each):
                self.trim(each, tier, len(each.held[tier.index]))

    def flush(self) -> int:
        """Forget everything, in all tiers. Nothing may be locked. Returns how many pages were held on the device."""
        flushed = self.device.pages_total
        for tier in self.tiers:
            assert tier.pages_unlocked == tier.pages_total, "flushed while a path is locked"
        for node in list(self.nodes()):
            for tier in self.tiers:
                tier.allocator.release(node.held[tier.index])
            node.parent = None
        self.root.children = {}
        self.root.branches = [0, 0]
        for tier in self.tiers:
            tier.clear()
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
            node_pages = len(child.key) // width
            shared = _common_pages(child.key, key, position, min(node_pages, end - position), width)
            yield child, shared
            if shared < node_pages:
                return
            node = child
            position += shared

    def _add(self, parent: Node, salt: bytes, key: bytes) -> Node:
        first = key[: self._page_bytes]
        edge = salt + first if parent is self.root else first
        assert edge not in parent.children, f"node {parent.node_id} has a child for this page already"
        node = Node(self.next_node_id, parent, edge, key)
        self.next_node_id += 1
        parent.children[edge] = node
        self._events.note(_ADDED, node.node_id, parent.node_id, len(key))
        return node

    def _take(self, node: Node, pages: list[int], step: int) -> None:
        """Make the tree a holder of device pages that `step` fills, as the next ones of a node."""
        node.fresh_from, node.filled_step = len(node.held[DEVICE]), step
        self.device.allocator.hold(pages)
        self.device.put(node, pages)

    def _split_after(self, node: Node, pages: int) -> Node:
        """Cut a node after `pages` pages, unless it ends there. The node keeps its end, so whoever locked it still ends
        there. Returns the part before the cut: a new node with the locks and the recency of the one it was cut from.
        """
        if pages == node.page_count:
            return node
        assert 0 < pages < node.page_count and node.parent is not None, (
            f"cut {pages} of {node.page_count} pages"
        )
        cut = pages * self._page_bytes
        upper = Node(self.next_node_id, node.parent, node.edge, node.key[:cut])
        self.next_node_id += 1
        upper.locks, upper.stamp, upper.filled_step = node.locks, node.stamp, node.filled_step
        upper.transfer_id = node.transfer_id
        upper.fresh_from, node.fresh_from = min(node.fresh_from, pages), max(node.fresh_from - pages, 0)
        node.parent.children[node.edge] = upper
        node.key, node.parent, node.edge = node.key[cut:], upper, node.key[cut : cut + self._page_bytes]
        upper.children[node.edge] = node
        for tier in self.tiers:
            held = node.held[tier.index]
            upper.held[tier.index].extend(held[:pages])
            del held[:pages]
            upper.branches[tier.index] = int(bool(held))
        for tier in self.tiers:
            tier.queue(upper)
        self._events.note(_SPLIT, upper.node_id, node.node_id, pages)
        return upper

    def _touch_path(self, node: Node) -> None:
        while node.parent is not None:
            self.clock += 1
            node.stamp = self.clock
            node = node.parent


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
