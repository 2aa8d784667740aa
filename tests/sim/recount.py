"""Checks the books of a scheduler by counting again from scratch. Raises AssertionError with the numbers."""

from __future__ import annotations

from collections import Counter

from engine.mem_cache.radix_cache import pack
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import State


def recount(scheduler: Scheduler) -> None:
    """Every page is free or held exactly as often as the reference count says; every lock has an owner."""
    cache, allocator = scheduler.cache, scheduler.allocator
    nodes = list(cache.nodes())
    tree_pages = [page for node in nodes for page in node.pages]
    assert len(set(tree_pages)) == len(tree_pages), "a page stands in the tree twice"
    holders = Counter(tree_pages)
    owners = [*scheduler.running, *scheduler.ended.values()]
    for sequence in owners:
        assert len(set(sequence.pages)) == len(sequence.pages), "a page stands in a page table twice"
        holders.update(sequence.pages)
    holders.update(allocator.pending_pages())
    free = allocator.free_pages()
    assert len(set(free)) == len(free), "a page is free twice"
    for page in range(allocator.page_count):
        assert allocator.references[page] == holders[page], (
            f"page {page}: {allocator.references[page]} references, {holders[page]} holders"
        )
    assert sorted(free) == [p for p in range(allocator.page_count) if not holders[p]], (
        "the free list is wrong"
    )

    locks: Counter[int] = Counter()
    for sequence in owners:
        node = sequence.node
        assert node is not None or sequence.state is State.ENDED, "a running sequence has no node"
        while node is not None and node.parent is not None:
            locks[node.node_id] += 1
            node = node.parent
        check_path(scheduler, sequence)
    for node in nodes:
        assert node.locks == locks[node.node_id], (
            f"node {node.node_id}: {node.locks} locks, {locks[node.node_id]} owners"
        )
        assert node.pages and len(node.key) == len(node.pages) * scheduler.capacity.page_size * 4
        assert node.parent is not None and node.parent.children[node.edge] is node
        assert all(child.stamp <= node.stamp for child in node.children.values()), (
            "a child is newer than its parent"
        )
    unlocked = sum(len(node.pages) for node in nodes if node.locks == 0)
    assert cache.pages_unlocked == unlocked, f"evictable {cache.pages_unlocked}, recounted {unlocked}"
    assert cache.pages_total == len(tree_pages)
    books = scheduler.books()
    assert min(books.available, books.evictable, books.protected) >= 0, books
    assert books.available + books.evictable + books.protected == books.capacity


def check_path(scheduler: Scheduler, sequence) -> None:
    """The path that a sequence locks spells its ids, in the pages of its own table."""
    node, key, pages = sequence.node, b"", []
    while node is not None and node.parent is not None:
        key, pages = node.key + key, node.pages + pages
        node = node.parent
    assert pages == sequence.pages[: len(pages)], "the page table and the tree name different pages"
    assert len(pages) == sequence.in_tree, f"{len(pages)} pages on the path, in_tree says {sequence.in_tree}"
    assert key == pack(sequence.ids)[: len(key)], "the path spells other ids than the sequence has"
    assert sequence.computed <= len(sequence.pages) * scheduler.capacity.page_size
