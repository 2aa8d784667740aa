"""The radix cache: against a dictionary of prefixes, and its order of eviction exact to the page."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

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
        self.tree.evict(count)
        return [page for page in self.allocator.free_pages() if page not in before]


# ---- matching ----


def test_the_longest_prefix_is_found_page_by_page():
    cache = Cache()
    pages = cache.insert("abcd")
    assert [cache.found(text) for text in ("a", "ab", "abcd", "abcde", "abx", "b", "")] == [1, 2, 4, 4, 2, 0, 0]
    node, found = cache.tree.match(b"", cache.key("abcdef"), 3)
    assert found == pages[:3] and node.pages == pages[:3]
    assert cache.found("abcd") == 4


def test_a_partial_page_is_never_cached():
    cache = Cache(page_size=16)
    assert cache.tree.peek(b"", pack(range(15)), 1000).pages == 0
    cache.insert("a")
    assert cache.tree.peek(b"", cache.key("a")[:-4], 1000).pages == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([5] * 64, [261] * 64),
        ([1, 23] * 32, [12, 3] * 32),
        ([*range(16), *range(50, 66)], [*range(50, 66), *range(16)]),
        ([65] * 16, [65 + 256] * 16),
        ([0x0102] * 16, [0x0201] * 16),
    ],
)
def test_different_prompts_never_share_a_page(one: list[int], other: list[int]):
    """vllm#12621, #8229: ids that agree in 8 bits, that join to the same decimals, or that only changed places."""
    cache = Cache(page_size=16)
    node, _ = cache.tree.match(b"", pack(one), 1000)
    cache.tree.lock(node)
    cache.tree.extend(node, b"", pack(one), cache.allocator.allocate(len(one) // 16), 1)
    assert cache.tree.peek(b"", pack(one), 1000).pages == len(one) // 16
    assert cache.tree.peek(b"", pack(other), 1000).pages == 0


def test_salts_part_the_tree_even_where_salt_and_ids_would_join_alike():
    cache = Cache(page_size=1)
    first = cache.insert("ab", salt=b"")
    second = cache.insert("ab", salt=b"x")
    assert not set(first) & set(second)
    assert cache.found("ab", salt=b"y") == 0
    # The salt "x" with page "a" is 5 bytes long; no salt of another length can give the same edge.
    assert cache.found("ab", salt=b"x" + cache.key("a")) == 0


# ---- inserting ----


def test_pages_that_the_tree_has_come_back_instead_of_ones_own():
    """mini-sglang#142: the caller must repoint its page table to these."""
    cache = Cache()
    cache.tree.lock(cache.tree.root)
    cache.tree.lock(cache.tree.root)
    first, second = cache.allocator.allocate(2), cache.allocator.allocate(3)
    _, held = cache.tree.extend(cache.tree.root, b"", cache.key("ab"), first, 1)
    assert held == first
    _, held = cache.tree.extend(cache.tree.root, b"", cache.key("abc"), second, 2)
    assert held == [*first, second[2]]
    assert cache.allocator.references[second[0]] == 1, "the tree did not take the duplicate"


def test_one_long_answer_stays_one_node():
    cache = Cache(page_size=1)
    node = cache.tree.root
    for letter in "abcdef":
        node, _ = cache.tree.extend(node, b"", cache.key(letter), cache.allocator.allocate(1), 1)
    assert [len(node.pages) for node in cache.tree.nodes()] == [6]


def test_a_node_that_another_ends_at_does_not_grow():
    cache = Cache(page_size=1)
    node, _ = cache.tree.extend(cache.tree.root, b"", cache.key("ab"), cache.allocator.allocate(2), 1)
    cache.tree.lock(node)
    end, _ = cache.tree.extend(node, b"", cache.key("c"), cache.allocator.allocate(1), 1)
    assert end is not node and end.parent is node and (node.locks, end.locks) == (2, 1)


def test_pages_of_this_step_are_fresh_those_before_them_in_the_node_are_not():
    cache = Cache(page_size=1)
    node, _ = cache.tree.extend(cache.tree.root, b"", cache.key("ab"), cache.allocator.allocate(2), 4)
    node, _ = cache.tree.extend(node, b"", cache.key("cd"), cache.allocator.allocate(2), 5)

    def fresh(text: str, step: int) -> tuple[int, int]:
        peek = cache.tree.peek(b"", cache.key(text), 1000, step)
        return peek.pages, peek.fresh_pages

    for _ in range(2):
        assert [fresh(text, 5) for text in ("a", "ab", "abc", "abcd")] == [(1, 0), (2, 0), (3, 1), (4, 2)]
        assert fresh("abcd", 4) == fresh("abcd", 6) == (4, 0)
        cache.tree.match(b"", cache.key("abcx"), 1000)  # Splits the node in the middle of its fresh pages.
    cache.tree.match(b"", cache.key("ax"), 1000)
    assert [fresh(text, 5) for text in ("a", "ab", "abc", "abcd")] == [(1, 0), (2, 0), (3, 1), (4, 2)]


# ---- eviction ----


def test_eviction_takes_the_least_recent_leaf_from_its_tail():
    cache = Cache()
    older, newer = cache.insert("abc"), cache.insert("xyz")
    assert cache.evicted(2) == [older[2], older[1]]
    assert cache.found("abc") == 1
    cache.tree.match(b"", cache.key("a"), 1)
    assert cache.evicted(2) == [newer[2], newer[1]]
    assert cache.evicted(9) == [newer[0], older[0]]
    assert cache.tree.pages_total == cache.tree.pages_unlocked == 0


def test_a_prefix_is_more_recent_than_all_that_follows_it():
    cache = Cache()
    first, second = cache.insert("abc"), cache.insert("abxy")
    order = cache.evicted(5)
    assert order == [first[2], second[3], second[2], second[1], second[0]]


def test_touching_part_of_a_node_saves_that_part_only():
    cache = Cache()
    long, other = cache.insert("abcd"), cache.insert("x")
    cache.tree.match(b"", cache.key("abz"), 1000)
    assert cache.evicted(5) == [long[3], long[2], other[0], long[1], long[0]]


def test_a_locked_path_is_not_evicted_and_counts_as_such():
    cache = Cache()
    kept = cache.insert("abcd")
    cache.insert("abx")
    node, _ = cache.tree.match(b"", cache.key("abc"), 1000)
    cache.tree.lock(node)
    assert (cache.tree.pages_total, cache.tree.pages_unlocked) == (5, 2)
    assert len(cache.evicted(9)) == 2 and cache.found("abcd") == 3
    cache.tree.unlock(node)
    assert cache.evicted(9) == [kept[2], kept[1], kept[0]]


def test_flush_forgets_all_but_never_a_locked_path():
    cache = Cache()
    cache.insert("abcd")
    node, _ = cache.tree.match(b"", cache.key("ab"), 1000)
    cache.tree.lock(node)
    with pytest.raises(AssertionError, match="locked"):
        cache.tree.flush()
    cache.tree.unlock(node)
    assert cache.tree.flush() == 4
    assert cache.found("abcd") == 0 and cache.allocator.available == 64
    assert cache.evicted(5) == [] and len(cache.insert("abcd")) == 4


def test_unlocking_too_often_is_a_programmers_error():
    cache = Cache()
    cache.insert("ab")
    node, _ = cache.tree.match(b"", cache.key("ab"), 1000)
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        cache.tree.unlock(node)


# ---- ten thousand random acts against a dictionary ----

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
        right = [self.model.pages[p].page if p in self.model.pages else own[i] for i, p in enumerate(prefixes[had:])]
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
        assert self.cache.tree.evict(count) == len(right)
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
            for index, page in enumerate(reversed(node.pages)):
                held[(salt, path[: len(path) - index * self.model.width])] = page
        assert held == {prefix: entry.page for prefix, entry in self.model.pages.items()}
        assert tree.pages_total == len(held)
        assert tree.pages_unlocked == sum(prefix not in locked for prefix in held)
        own = [page for holder in self.holders for page in holder.pages]
        for page in range(40):
            assert self.cache.allocator.references[page] == own.count(page) + list(held.values()).count(page)


@pytest.mark.parametrize("page_size", [1, 4])
def test_ten_thousand_random_acts_against_a_dictionary(page_size: int):
    """sglang#35270, #10637: what is cached, evictable and free is a partition after every act."""
    play = Play(seed=page_size, page_size=page_size)
    acts = [play.open, play.open, play.grow, play.grow, play.grow, play.close, play.evict, play.peek]
    for number in range(10_000):
        play.step += play.draw.randrange(2)
        play.draw.choice(acts)()
        if number % 500 == 0:
            while play.holders:
                play.close()
            play.flush()
        play.compare()
