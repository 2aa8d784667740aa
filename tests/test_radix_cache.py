"""The radix cache: against a dictionary of prefixes, and its order of eviction exact to the page."""

from __future__ import annotations

import pytest

from engine.mem_cache.radix_cache import pack
from tests.sim.tree import Cache, Play

# ---- matching ----


def test_the_longest_prefix_is_found_page_by_page():
    cache = Cache()
    pages = cache.insert("abcd")
    assert [cache.found(text) for text in ("a", "ab", "abcd", "abcde", "abx", "b", "")] == [
        1,
        2,
        4,
        4,
        2,
        0,
        0,
    ]
    node, found = cache.tree.match(b"", cache.key("abcdef"), 3)
    assert found == pages[:3] and node.held[0] == pages[:3]
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
    assert [len(node.held[0]) for node in cache.tree.nodes()] == [6]


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
    assert cache.tree.device.pages_total == cache.tree.device.pages_unlocked == 0


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
    assert (cache.tree.device.pages_total, cache.tree.device.pages_unlocked) == (5, 2)
    assert len(cache.evicted(9)) == 2 and cache.found("abcd") == 3
    cache.tree.unlock(node)
    assert cache.evicted(9) == [kept[2], kept[1], kept[0]]


def test_a_path_that_is_locked_long_after_its_last_touch_is_not_evicted():
    cache = Cache()
    cache.insert("ab")
    cache.insert("x")
    node, _ = cache.tree.match(b"", cache.key("ab"), 1000)
    assert len(cache.evicted(1)) == 1 and cache.found("ab") == 2
    cache.tree.lock(node)
    assert cache.evicted(9) == []


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


@pytest.mark.parametrize("host_pages", [0, 7, 30, 200])
@pytest.mark.parametrize("page_size", [1, 4])
def test_thousands_of_random_acts_against_a_dictionary(page_size: int, host_pages: int):
    """sglang#35270, #10637: what is cached, evictable and free is a partition after every act, in each tier.

    sglang#16909, #28614: what the host holds of a path is its beginning, also where it is smaller than the device.
    """
    play = Play(page_size, page_size, host_pages)
    acts = [play.open, play.open, play.grow, play.grow, play.grow, play.close, play.evict, play.peek]
    if host_pages:
        acts += [play.back_up, play.back_up, play.load, play.load, play.settle, play.settle, play.settle]
    for number in range(5_000):
        play.step += play.draw.randrange(2)
        play.draw.choice(acts)()
        if number % 500 == 0:
            while play.holders:
                play.close()
            while play.copying:
                play.settle()
            play.flush()
        play.compare()
