"""A radix cache beside a dictionary of prefixes: random acts are played on both, and both must say the same.

The dictionary has one entry for each cached page, under its salt and the ids from the start of the prompt to its
end. It knows recency and locks by the page, so it also says in which order pages must be evicted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.radix_cache import Node, RadixCache, pack
from engine.scheduler.digest import Accumulator


class Cache:
    """A tree with its allocator, and what tests do with them."""

    def __init__(self, page_size: int = 2, pages: int = 64) -> None:
        self.events = Accumulator()
        self.allocator = PageAllocator(pages, self.events)
        self.tree = RadixCache(page_size, self.allocator, self.events)
        self.page_size = page_size

    def insert(self, text: str, salt: bytes = b"") -> list[int]:
        """Cache a prompt whose pages are written as letters; returns the pages that now hold it."""
        key = self.key(text)
        node, found = self.tree.match(salt, key, 1000)
        self.tree.lock(node)
        self.allocator.hold(found)
        own = self.allocator.allocate(len(text) - len(found))
        node, held = self.tree.extend(node, salt, key[len(found) * self.page_size * 4 :], own, 1)
        self.tree.unlock(node)
        self.allocator.release(found + own)
        return found + held

    def found(self, text: str, salt: bytes = b"") -> int:
        return self.tree.peek(salt, self.key(text), 1000).pages

    def key(self, text: str) -> bytes:
        return pack([ord(letter) + i for letter in text for i in range(self.page_size)])

    def evicted(self, count: int) -> list[int]:
        before = set(self.allocator.free_pages())
        self.tree.evict(self.tree.device, count)
        return [page for page in self.allocator.free_pages() if page not in before]


Prefix = tuple[bytes, bytes]
"""Salt and the ids of a whole number of pages."""


@dataclass
class Held:
    """A cached page in the model: its number, its recency and the step that filled it."""

    page: int
    stamp: tuple[int, int] = (0, 0)
    step: int = 0


@dataclass
class Holder:
    """A sequence of the model: it holds its pages and locks its path."""

    salt: bytes
    key: bytes
    node: Node
    pages: list[int]


class Model:
    """What the tree should hold, without a tree: each cached prefix in whole pages, one entry a page."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.pages: dict[Prefix, Held] = {}
        self.touches = 0

    def prefixes(self, salt: bytes, key: bytes) -> list[Prefix]:
        return [(salt, key[:end]) for end in range(self.width, len(key) + 1, self.width)]

    def matching(self, salt: bytes, key: bytes, pages_max: int) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(salt, key)[:pages_max]:
            if prefix not in self.pages:
                break
            found.append(prefix)
        return found

    def touch(self, prefixes: list[Prefix]) -> None:
        self.touches += 1
        for depth, prefix in enumerate(prefixes):
            self.pages[prefix].stamp = (self.touches, -depth)

    def locked(self, holders: list[Holder]) -> set[Prefix]:
        return {prefix for holder in holders for prefix in self.prefixes(holder.salt, holder.key)}

    def evict(self, count: int, locked: set[Prefix]) -> list[int]:
        evicted = []
        while len(evicted) < count:
            parents = {(salt, key[: -self.width]) for salt, key in self.pages}
            leaves = [prefix for prefix in self.pages if prefix not in parents and prefix not in locked]
            if not leaves:
                break
            oldest = min(leaves, key=lambda prefix: self.pages[prefix].stamp)
            evicted.append(self.pages.pop(oldest).page)
        return evicted


class Play:
    """Plays random acts on tree and model and compares them."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.draw = random.Random(seed)
        self.page_size = page_size
        self.cache = Cache(page_size, pages=40)
        self.model = Model(page_size * 4)
        self.holders: list[Holder] = []
        self.step = 1

    def random_key(self) -> bytes:
        return self.cache.key("".join(self.draw.choice("abc") for _ in range(self.draw.randint(0, 7))))

    def match(self, salt: bytes, key: bytes, pages_max: int) -> tuple[Node, list[int], list[Prefix]]:
        right = self.model.matching(salt, key, pages_max)
        node, pages = self.cache.tree.match(salt, key, pages_max)
        assert pages == [self.model.pages[prefix].page for prefix in right]
        self.model.touch(right)
        return node, pages, right

    def open(self) -> None:
        salt, key = self.draw.choice((b"", b"s")), self.random_key()
        node, pages, right = self.match(salt, key, self.draw.randint(0, 8))
        if len(self.holders) < 6:
            self.cache.tree.lock(node)
            self.cache.allocator.hold(pages)
            self.holders.append(Holder(salt, right[-1][1] if right else b"", node, pages))

    def grow(self) -> None:
        if not self.holders:
            return
        holder, more = self.draw.choice(self.holders), self.random_key()
        count = len(more) // self.model.width
        if not 0 < count <= self.cache.allocator.available:
            return
        own = self.cache.allocator.allocate(count)
        key = holder.key + more
        had = len(holder.pages)
        prefixes = self.model.prefixes(holder.salt, key)
        right = [
            self.model.pages[p].page if p in self.model.pages else own[i]
            for i, p in enumerate(prefixes[had:])
        ]
        holder.node, held = self.cache.tree.extend(holder.node, holder.salt, more, own, self.step)
        assert held == right
        for prefix, page in zip(prefixes[had:], right, strict=True):
            if prefix not in self.model.pages:
                self.model.pages[prefix] = Held(page, step=self.step)
        self.model.touch(prefixes)
        for mine, kept in zip(own, held, strict=True):
            if mine != kept:
                self.cache.allocator.hold([kept])
                self.cache.allocator.release([mine])
        holder.key, holder.pages = key, holder.pages + held

    def close(self) -> None:
        if self.holders:
            holder = self.holders.pop(self.draw.randrange(len(self.holders)))
            self.cache.tree.unlock(holder.node)
            self.cache.allocator.release(holder.pages)

    def evict(self) -> None:
        count = self.draw.randint(0, 9)
        free = len(self.cache.allocator.free_pages())
        right = self.model.evict(count, self.model.locked(self.holders))
        assert self.cache.tree.evict(self.cache.tree.device, count) == len(right)
        assert self.cache.allocator.free_pages()[free:] == right

    def peek(self) -> None:
        salt, key, pages_max = self.draw.choice((b"", b"s")), self.random_key(), self.draw.randint(0, 8)
        right = self.model.matching(salt, key, pages_max)
        locked = self.model.locked(self.holders)
        found = self.cache.tree.peek(salt, key, pages_max, self.step)
        assert found.pages == len(right)
        assert found.evictable_pages == sum(prefix not in locked for prefix in right)
        assert found.fresh_pages == sum(self.model.pages[prefix].step == self.step for prefix in right)

    def flush(self) -> None:
        if not self.holders:
            assert self.cache.tree.flush() == len(self.model.pages)
            self.model.pages = {}

    def path(self, node: Node) -> Prefix:
        """What the way from the root to the end of a node spells."""
        key = edge = b""
        while node.parent is not None:
            key, edge, node = node.key + key, node.edge, node.parent
        return edge[: -self.model.width], key

    def compare(self) -> None:
        tree, locked = self.cache.tree, self.model.locked(self.holders)
        held: dict[Prefix, int] = {}
        for node in tree.nodes():
            salt, path = self.path(node)
            for index, page in enumerate(reversed(node.held[0])):
                held[(salt, path[: len(path) - index * self.model.width])] = page
        assert held == {prefix: entry.page for prefix, entry in self.model.pages.items()}
        assert tree.device.pages_total == len(held)
        assert tree.device.pages_unlocked == sum(prefix not in locked for prefix in held)
        own = [page for holder in self.holders for page in holder.pages]
        for page in range(40):
            assert self.cache.allocator.references[page] == own.count(page) + list(held.values()).count(page)
