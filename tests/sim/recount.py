"""Checks the books of a scheduler by counting again from scratch. Raises AssertionError with the numbers."""

from __future__ import annotations

from collections import Counter

from engine.mem_cache.radix_cache import pack
from engine.mem_cache.tier import DEVICE, HOST, Node, Tier
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import State


def recount(scheduler: Scheduler) -> None:
    """Every page is free or held exactly as often as the reference count says; every lock has an owner."""
    cache = scheduler.cache
    owners = [*scheduler.running, *scheduler.ended.values()]
    copies = scheduler.hicache.under_way.values()
    loads = [copy.transfer for copy in copies if copy.transfer.kind == "load"]
    backups = [copy.transfer for copy in copies if copy.transfer.kind == "backup"]
    device_holders = [sequence.pages for sequence in owners] + [list(load.device_pages) for load in loads]
    device_holders.append(scheduler.allocator.pending_pages())
    for sequence in owners:
        assert len(set(sequence.pages)) == len(sequence.pages), "a page stands in a page table twice"
    recount_tier(scheduler, cache.device, device_holders)
    recount_tier(scheduler, cache.host, [list(backup.host_pages) for backup in backups])

    locks: Counter[int] = Counter()
    for sequence in owners:
        assert sequence.node is not None or sequence.state is State.ENDED, "a running sequence has no node"
        check_path(scheduler, sequence)
    for node in [sequence.node for sequence in owners] + [copy.node for copy in copies]:
        while node is not None and node.parent is not None:
            locks[node.node_id] += 1
            node = node.parent
    pins = Counter(copy.node.node_id for copy in copies)
    for node in cache.nodes():
        check_node(node, scheduler.capacity.page_size)
        assert (node.locks, node.pins) == (locks[node.node_id], pins[node.node_id]), (
            f"node {node.node_id}: {node.locks} locks and {node.pins} pins, but {locks[node.node_id]} and "
            f"{pins[node.node_id]} owners"
        )
    check_copies(scheduler)


def recount_tier(scheduler: Scheduler, tier: Tier, holders_outside: list[list[int]]) -> None:
    """One tier's pages: free, in the tree or held by somebody else, each as often as its reference count says."""
    allocator, nodes = tier.allocator, list(scheduler.cache.nodes())
    tree_pages = [page for node in nodes for page in node.held[tier.index]]
    assert len(set(tree_pages)) == len(tree_pages), "a page stands in the tree twice"
    holders = Counter(tree_pages)
    for pages in holders_outside:
        holders.update(pages)
    free = allocator.free_pages()
    assert len(set(free)) == len(free), "a page is free twice"
    for page in range(allocator.page_count):
        assert allocator.references[page] == holders[page], (
            f"page {page} of tier {tier.index}: {allocator.references[page]} references, {holders[page]} holders"
        )
    assert sorted(free) == [p for p in range(allocator.page_count) if not holders[p]], (
        "the free list is wrong"
    )
    unlocked = sum(len(node.held[tier.index]) for node in nodes if node.locks == 0)
    assert tier.pages_unlocked == unlocked, f"evictable {tier.pages_unlocked}, recounted {unlocked}"
    assert tier.pages_total == len(tree_pages)
    books = tier.books()
    assert min(books.available, books.evictable, books.protected) >= 0, books
    assert books.available + books.evictable + books.protected == books.capacity


def check_node(node: Node, page_size: int) -> None:
    """The shape of the tree: each page of a node is held by a tier, and a tier holds what it holds from the top on."""
    length = len(node.key) // (page_size * 4)
    assert length == node.page_count > 0 and len(node.key) == length * page_size * 4
    assert node.parent is not None and node.parent.children[node.edge] is node
    children = node.children.values()
    assert all(child.stamp <= node.stamp for child in children), "a child is newer than its parent"
    for tier in (DEVICE, HOST):
        holding = sum(bool(child.held[tier]) for child in children)
        assert node.branches[tier] == holding, (
            f"node {node.node_id}: {node.branches} branches, {holding} counted"
        )
        assert not holding or len(node.held[tier]) == length, (
            f"node {node.node_id}: tier {tier} has a child's pages, but of its own only {node.held[tier]}"
        )


def check_copies(scheduler: Scheduler) -> None:
    """Copies cover what they say: sources that are there, nodes that are marked, no node twice."""
    cache = scheduler.cache
    marks = {node.node_id: node.transfer_id for node in cache.nodes()}
    paths: set[tuple[int, int]] = set()
    for copy in scheduler.hicache.under_way.values():
        transfer, end = copy.transfer, copy.start + len(copy.transfer.host_pages)
        loads = transfer.kind == "load"
        pages: list[int] = []
        for depth, node in cache.path(copy.node):
            pages += node.held[HOST if loads else DEVICE]
            paths.add((node.node_id, transfer.transfer_id))
            if depth < end and depth + node.page_count > copy.start:
                assert marks[node.node_id] == transfer.transfer_id, (
                    f"node {node.node_id}: no mark of {transfer}"
                )
        source = transfer.host_pages if loads else transfer.device_pages
        assert pages[copy.start : end] == list(source), f"{transfer} copies other pages than the tree has"
    for node_id, transfer_id in marks.items():
        assert not transfer_id or (node_id, transfer_id) in paths, (
            f"node {node_id} is marked by {transfer_id}"
        )


def check_path(scheduler: Scheduler, sequence) -> None:
    """The path that a sequence locks spells its ids, in the pages of its own table."""
    node, key, pages = sequence.node, b"", []
    while node is not None and node.parent is not None:
        key, pages = node.key + key, node.held[DEVICE] + pages
        node = node.parent
    assert pages == sequence.pages[: len(pages)], "the page table and the tree name different pages"
    assert len(pages) == sequence.in_tree, f"{len(pages)} pages on the path, in_tree says {sequence.in_tree}"
    assert key == pack(sequence.ids)[: len(key)], "the path spells other ids than the sequence has"
    assert sequence.computed <= len(sequence.pages) * scheduler.capacity.page_size
    if sequence.loading:
        copy = scheduler.hicache.under_way[sequence.loading]
        assert sequence.computed == sequence.in_tree * scheduler.capacity.page_size
        assert list(copy.transfer.device_pages) == sequence.pages[sequence.in_tree :]
