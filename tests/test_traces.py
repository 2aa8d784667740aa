"""Two public request traces through the radix cache: how many blocks it finds is known to the block.

A block of 512 tokens, named by one hash id, stands for one page here, so capacities are in blocks. One request after
the other: look up, make room, insert. The right numbers are those of a strict LRU list of blocks in which a request's
earlier blocks are more recent than its later ones. See `tests/data/README.md`.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import pytest

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.radix_cache import RadixCache, pack
from engine.scheduler.digest import Accumulator

BLOCK_TOKENS = 512
UNBOUNDED = 200_000
"""Blocks; more than the 182,790 and 43,924 distinct ones of the traces."""


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
        events.fold()
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
    larger, smaller = (replay("conversation", tokens // BLOCK_TOKENS)[0] for tokens in (8_023_168, 7_621_952))
    parted = [number for number, pair in enumerate(zip(larger, smaller, strict=True)) if pair[0] != pair[1]]
    assert (len(parted), parted[0]) == (79, 1055)
    assert (larger[1055], smaller[1055]) == (47, 1)
    assert (sum(larger), sum(smaller)) == (75_414, 73_552)
