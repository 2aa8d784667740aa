"""Who fits, who comes first, who gives way."""

from __future__ import annotations

import pytest

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.radix_cache import RadixCache, pack
from engine.scheduler import policy
from engine.scheduler.digest import Accumulator
from engine.scheduler.sequence import Sequence
from tests.sim.single import capacity, request
from tests.sim.tree import Cache


@pytest.mark.parametrize(
    ("prompt", "new", "fits"),
    [(512, 1, True), (513, 1, False), (300, 213, True), (300, 214, False), (1, 512, True), (600, 4, False)],
)
def test_a_request_fits_iff_all_rows_it_can_have_fit(prompt: int, new: int, fits: bool):
    """vllm#39734: what can never run is refused at once, with the numbers. The last token has no row."""
    counts = capacity(page_size=16, device_pages=32, context_length=4096)
    problem = policy.does_not_fit(request(1, range(prompt), new), counts)
    assert (problem == "") == fits
    if not fits:
        assert str(prompt) in problem and "512" in problem


@pytest.mark.parametrize("length", range(55, 67))
@pytest.mark.parametrize("new", [1, 8, 64])
def test_the_context_holds_prompt_and_output_exactly(length: int, new: int):
    """sglang#2876, #8096: no margins of one, five or seven tokens."""
    problem = policy.does_not_fit(
        request(1, range(length), new), capacity(page_size=1, device_pages=4096, context_length=64)
    )
    assert (problem == "") == (length + new <= 64)
    if problem:
        assert f"{length + new}" in problem and "64" in problem


def test_the_fit_is_counted_in_whole_pages():
    counts = capacity(page_size=16, device_pages=2)
    assert policy.does_not_fit(request(1, range(17), 16), counts) == ""
    assert "needs 48 tokens of cache, but the capacity is 32" in policy.does_not_fit(
        request(1, range(17), 17), counts
    )


def test_an_empty_prompt_is_refused():
    assert "no tokens" in policy.does_not_fit(request(1, ()), capacity())


def test_pages_for():
    assert [policy.pages_for(tokens, 16) for tokens in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_committed_pages_are_the_rest_of_the_ids_and_growth_up_to_the_last_row():
    sequence = Sequence(request(1, range(20), new=9), 1)
    sequence.pages = [0, 1]
    for growth, pages in ((0, 5), (4, 6), (8, 7), (64, 7)):
        assert policy.committed_pages([sequence], capacity(growth_tokens=growth)) == pages - 2
    sequence.pages = list(range(9))
    assert policy.committed_pages([sequence], capacity()) == 0


def sequences(count: int) -> list[Sequence]:
    return [Sequence(request(i, range(i, i + 20)), number=i) for i in range(1, count + 1)]


def test_the_victim_is_the_latest_idle_arrival_never_the_oldest_never_older_than_the_needy():
    first, second, third, fourth = running = sequences(4)
    assert policy.victim(running, first) is fourth
    fourth.in_flight = 1
    assert policy.victim(running, first) is third
    assert policy.victim(running, second) is third
    third.in_flight = 1
    assert policy.victim(running, second) is second, "it gives way itself"
    assert policy.victim(running, third) is None
    second.in_flight = 1
    assert policy.victim(running, first) is None
    assert policy.victim([first], first) is None


def test_lpm_orders_by_cached_prefix_then_arrival_and_lets_the_overtaken_first():
    events = Accumulator()
    allocator = PageAllocator(64, events)
    cache = RadixCache(4, allocator, events)
    waiting = sequences(5)
    for sequence, pages in ((waiting[3], 2), (waiting[1], 1), (waiting[4], 2)):
        cache.lock(cache.root)
        cache.extend(cache.root, b"", pack(sequence.ids[: pages * 4]), allocator.allocate(pages), 1)

    def order() -> list[int]:
        return [s.number for s in policy.waiting_order(waiting, "lpm", cache, 4)]

    assert order() == [4, 5, 2, 1, 3]
    waiting[2].overtaken = policy.OVERTAKEN_MAX
    waiting[4].overtaken = policy.OVERTAKEN_MAX + 5
    assert order() == [3, 5, 4, 2, 1]
    assert policy.waiting_order(waiting, "fcfs", cache, 4) == waiting


def test_lpm_counts_what_the_host_has_too():
    """A page that comes back by a copy is not computed either."""
    cache = Cache(page_size=4, host_pages=16)
    waiting = sequences(3)
    for sequence, pages in ((waiting[1], 1), (waiting[2], 2)):
        cache.tree.lock(cache.tree.root)
        own = cache.allocator.allocate(pages)
        cache.tree.extend(cache.tree.root, b"", pack(sequence.ids[: pages * 4]), own, 1)
    for node in list(cache.tree.nodes())[1:]:
        cache.tree.unlock(node)
        cache.allocator.release(node.held[0])
        cache.copies.matched(node)
        cache.settle()
    assert cache.tree.evict(cache.tree.device, 2) == 2
    assert [s.number for s in policy.waiting_order(waiting, "lpm", cache.tree, 4)] == [3, 2, 1]


@pytest.mark.parametrize(
    ("page_size", "worth"), [(1, {9: 0, 10: 10}), (4, {2: 0, 3: 3}), (5, {1: 0, 2: 2}), (16, {0: 0, 1: 1})]
)
def test_a_prefix_on_the_host_is_worth_a_copy_from_ten_tokens_on(page_size: int, worth: dict[int, int]):
    assert {pages: policy.pages_to_load(pages, page_size) for pages in worth} == worth


def test_lpm_looks_at_the_oldest_of_a_long_queue():
    events = Accumulator()
    waiting = sequences(policy.LPM_WINDOW + 10)
    found = policy.waiting_order(waiting, "lpm", RadixCache(4, PageAllocator(1, events), events), 4)
    assert [s.number for s in found] == list(range(1, policy.LPM_WINDOW + 1))
