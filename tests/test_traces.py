"""Two public request traces through the radix cache: how many blocks it finds is known to the block.

A block of 512 tokens, named by one hash id, stands for one page here, so capacities are in blocks. One request after
the other: look up, make room, insert; with two tiers all copies have settled before the next comes. The right numbers
are those of a strict LRU list of blocks in which a request's earlier blocks are more recent than its later ones. See
`tests/data/README.md`.
"""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.hicache import HiCache
from engine.mem_cache.radix_cache import RadixCache, pack
from engine.scheduler.digest import Accumulator
from engine.types import TransferResult, WritePolicy
from examples import trace

BLOCK_TOKENS = 512
UNBOUNDED = 200_000
"""Blocks; more than the 182,790 and 43,924 distinct ones of the traces."""
DEVICE_BLOCKS = 1_000
"""The device before a host tier: 512,000 tokens."""
HOST_TOKENS = (8_023_168, 7_621_952)
"""What 100 GB hold on stages of 19 and of 20 layers of GLM-5.2 in FP8."""


@functools.cache
def prompts(name: str) -> list[bytes]:
    """Each request's blocks as a key with one id a page."""
    path = Path(__file__).parent / "data" / f"{name}_trace.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        return [pack(json.loads(line)["hash_ids"]) for line in lines]


@functools.cache
def replay(name: str, capacity_blocks: int) -> tuple[list[int], int, int]:
    """Blocks found by each request, blocks asked for in all, and blocks cached at the end."""
    events = Accumulator()
    allocator = PageAllocator(capacity_blocks, events)
    cache = RadixCache(1, allocator, events)
    found, asked = [], 0
    for step, key in enumerate(prompts(name), start=1):
        length = len(key) // 4
        node, pages = cache.match(b"", key, length)
        cache.lock(node)
        allocator.hold(pages)
        missing = length - len(pages)
        cache.evict(cache.device, missing - allocator.available)
        own = allocator.allocate(missing)
        node, _ = cache.extend(node, b"", key[len(pages) * 4 :], own, step)
        cache.unlock(node)
        allocator.release(pages + own)
        events.take()
        found.append(len(pages))
        asked += length
    return found, asked, cache.device.pages_total


@pytest.mark.parametrize(
    ("name", "requests", "asked", "found", "distinct"),
    [("conversation", 12_031, 288_500, 105_710, 182_790), ("synthetic", 3_993, 121_877, 77_953, 43_924)],
)
def test_without_a_bound_all_that_came_before_is_found(
    name: str, requests: int, asked: int, found: int, distinct: int
):
    per_request, blocks, cached = replay(name, UNBOUNDED)
    assert (len(per_request), blocks, sum(per_request), cached) == (requests, asked, found, distinct)


@pytest.mark.parametrize(
    ("capacity_tokens", "conversation", "synthetic"),
    [
        (50_000_000, 36.35, 63.96),
        (10_000_000, 28.52, 56.66),
        (3_000_000, 13.61, 30.94),
        (1_000_000, 5.33, 14.24),
    ],
)
def test_with_a_bound_the_share_found_is_that_of_a_strict_lru(
    capacity_tokens: int, conversation: float, synthetic: float
):
    for name, percent in (("conversation", conversation), ("synthetic", synthetic)):
        found, asked, cached = replay(name, capacity_tokens // BLOCK_TOKENS)
        assert round(100 * sum(found) / asked, 2) == percent
        assert cached <= capacity_tokens // BLOCK_TOKENS


def test_what_two_capacities_do_to_real_traffic():
    """sglang#29258: the two host capacities of the report on one trace; at request 1055 the stages part."""
    larger, smaller = (replay("conversation", tokens // BLOCK_TOKENS)[0] for tokens in HOST_TOKENS)
    parted = [number for number, pair in enumerate(zip(larger, smaller, strict=True)) if pair[0] != pair[1]]
    assert (len(parted), parted[0]) == (79, 1055)
    assert (larger[1055], smaller[1055]) == (47, 1)
    assert (sum(larger), sum(smaller)) == (75_414, 73_552)


@dataclass(slots=True)
class Met:
    """What each request found in two tiers: one number for each, in blocks."""

    found: list[int] = field(default_factory=list)
    """Of its prompt, on the device or on the host."""
    loaded: list[int] = field(default_factory=list)
    """Of these, copied from the host."""
    host_held_most: int = 0


@functools.cache
def replay_two_tiers(host_tokens: int, write_policy: WritePolicy) -> Met:
    """The conversation trace through a device of 1,000 blocks and a host; any block is worth a copy."""
    events = Accumulator()
    device = PageAllocator(DEVICE_BLOCKS, events)
    cache = RadixCache(1, device, events, PageAllocator(host_tokens // BLOCK_TOKENS, events))
    copies, met = HiCache(cache, write_policy, events), Met()

    def settle() -> None:
        for transfer in copies.plan():
            copies.settle(TransferResult(transfer_id=transfer.transfer_id, ok=True))

    def room(count: int) -> list[int]:
        while (pages := copies.take_device_pages(count)) is None:
            settle()
        return pages

    for step, key in enumerate(prompts("conversation"), start=1):
        length = len(key) // 4
        node, pages = cache.match(b"", key, length)
        cache.lock(node)
        end, host_pages = cache.match_host(node, b"", key[len(pages) * 4 :], length)
        if host_pages:
            cache.lock(end)
            copies.load(end, host_pages, room(len(host_pages)))
            settle()
            cache.unlock(node)
            node, pages = cache.match(b"", key, length)
        copies.matched(node)
        own = room(length - len(pages))
        node, _ = cache.extend(node, b"", key[len(pages) * 4 :], own, step)
        copies.inserted(node)
        cache.unlock(node)
        device.release(own)
        settle()
        events.take()
        met.found.append(len(pages))
        met.loaded.append(len(host_pages))
        met.host_held_most = max(met.host_held_most, cache.host.pages_total)
    return met


@pytest.mark.parametrize("host_tokens", HOST_TOKENS)
def test_write_through_finds_in_two_tiers_what_one_strict_lru_of_the_hosts_size_finds(host_tokens: int):
    """All that the device holds is on the host too, and what is older than that goes first: so request by request."""
    met = replay_two_tiers(host_tokens, "write_through")
    assert met.found == replay("conversation", host_tokens // BLOCK_TOKENS)[0]
    assert met.host_held_most == host_tokens // BLOCK_TOKENS
    device_alone = replay("conversation", DEVICE_BLOCKS)[0]
    assert sum(met.found) - sum(met.loaded) == sum(device_alone), "the device holds what it would hold alone"


@pytest.mark.parametrize(
    ("write_policy", "found", "parted", "first", "blocks"),
    [
        ("write_through", (75_414, 73_552), 79, 1055, (47, 1)),
        ("write_back", (76_635, 75_304), 70, 861, (3, 1)),
    ],
)
def test_where_stages_with_two_tiers_part(
    write_policy: WritePolicy, found: tuple[int, int], parted: int, first: int, blocks: tuple[int, int]
):
    """sglang#29258 on real traffic. What is written back late is held once and not twice, so that more is found."""
    larger, smaller = (replay_two_tiers(tokens, write_policy).found for tokens in HOST_TOKENS)
    assert (sum(larger), sum(smaller)) == found
    numbers = [number for number, pair in enumerate(zip(larger, smaller, strict=True)) if pair[0] != pair[1]]
    assert (len(numbers), numbers[0]) == (parted, first)
    assert (larger[first], smaller[first]) == blocks


def test_the_stages_of_the_known_fault_part_at_request_1055():
    """sglang#29258 in the whole scheduler, chunks, copies and all, with the capacities that the report names."""
    lesser, greater = (trace.replay(2**20, tokens, stop=1056) for tokens in (7_621_952, 8_023_168))
    assert trace.first_difference(lesser, greater) == 1055
    found = [stage[-1].device_tokens + stage[-1].host_tokens for stage in (greater, lesser)]
    assert found == [47 * 512, 512]
