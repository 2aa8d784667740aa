"""The hierarchy, one behaviour at a time: when pages are copied between the tiers, and when a copy counts.

The driver checks after every step that the books of both tiers recount, that no copy's pages are touched by others,
and that what is read is what the prompt spells; it settles all copies with the next entry unless told to wait.
"""

from __future__ import annotations

from random import Random

import pytest

from engine.mem_cache.tier import DEVICE, HOST
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.state_vector import STATE_FIELDS, counters
from engine.types import Entry, Transfer, TransferResult
from tests.sim.single import Driver, capacity, decoding_trio, request, rows
from tests.sim.tree import Cache

POLICIES = ("write_through", "write_through_selective", "write_back")


def small(**changes: object) -> Driver:
    """A device of 8 pages of 4 tokens before a host of 32."""
    return Driver(**({"device_pages": 8, "host_pages": 32} | changes))


def fill_device(driver: Driver, request_id: int = 90) -> None:
    """Run a prompt that needs every page of the device."""
    counts = driver.scheduler.capacity
    driver.run(request(request_id, [request_id] * (counts.device_pages * counts.page_size), new=1))


def demoted(**changes: object) -> Driver:
    """Four pages of `range(16)` lie on the host alone."""
    driver = small(**changes)
    driver.run(request(1, range(17), new=1))
    fill_device(driver)
    assert on_host(driver, range(17)) == (0, 4)
    return driver


def on_host(driver: Driver, ids: range) -> tuple[int, int]:
    """Pages of a prompt on the device, and behind them on the host alone."""
    key = b"".join(token.to_bytes(4, "little") for token in ids)
    found = driver.scheduler.cache.peek(b"", key, 1000)
    return found.pages, found.host_pages


def host_books(driver: Driver) -> tuple[int, int, int]:
    """Pages of the host: available, evictable, protected."""
    books, size = driver.scheduler.cache.host.books(), driver.scheduler.capacity.page_size
    return books.available // size, books.evictable // size, books.protected // size


def kinds(transfers: tuple[Transfer, ...]) -> list[tuple[str, int]]:
    return [(transfer.kind, len(transfer.host_pages)) for transfer in transfers]


# ---- demotion and load-back ----


def test_a_prefix_that_was_pushed_out_of_the_device_comes_back_from_the_host():
    driver = small()
    [backup] = driver.step(request(1, range(17), new=1)).transfers
    driver.run()
    fill_device(driver)
    plan = driver.step(request(2, range(17), new=1))
    [load] = plan.transfers
    assert (load.kind, load.host_pages) == ("load", backup.host_pages) and not plan.spans
    driver.run()
    assert (driver.cached[2], driver.cached_host[2]) == (16, 16) and driver.tokens[2] == driver.tokens[1]
    counted = counters(driver.scheduler)
    assert (counted["demoted_pages"], counted["loaded_pages"], counted["failed_copies"]) == (4 + 5, 4, 0), (
        "the other prompt has made room for four pages that are loaded and one that is computed"
    )


def test_a_load_is_planned_and_settled_before_its_span_is_planned_while_others_run():
    driver = demoted(device_pages=16)
    driver.step(request(3, [3] * 4, new=30))
    plan = driver.step(request(2, range(17), new=2))
    assert rows(plan) == {3: (4, 5)} and kinds(plan.transfers) == [("load", 4)]
    assert rows(driver.step(settle=0)) == {3: (5, 6)}
    assert rows(driver.step(settle=0)) == {3: (6, 7)}
    assert rows(driver.step()) == {3: (7, 8), 2: (16, 17)}


def test_the_device_part_stays_and_only_the_rest_is_loaded():
    driver = demoted(device_pages=16)
    driver.run(request(2, range(8), new=1))
    assert on_host(driver, range(17)) == (2, 2)
    driver.run(request(3, range(17), new=1))
    assert (driver.cached[3], driver.cached_host[3]) == (8, 0), "8 tokens are not worth a copy"
    driver.run(request(4, range(100, 133), new=1))
    fill_device(driver, 91)
    driver.run(request(5, range(100, 112), new=1))
    driver.run(request(6, range(100, 133), new=1))
    assert (driver.cached[6], driver.cached_host[6]) == (32, 20)


def test_delivered_tokens_that_come_back_from_the_host_are_no_prompt_tokens():
    driver = demoted()
    driver.run(request(2, range(12), new=9, delivered=range(12, 17)))
    assert (driver.cached[2], driver.cached_host[2]) == (12, 12)


@pytest.mark.parametrize(("length", "loads"), [(10, 0), (11, 1)])
def test_less_than_ten_tokens_are_computed_again(length: int, loads: int):
    driver = Driver(page_size=1, device_pages=16, host_pages=64)
    driver.run(request(1, range(length), new=1))
    fill_device(driver)
    plan = driver.step(request(2, range(length), new=1))
    assert [transfer.kind for transfer in plan.transfers].count("load") == loads
    assert rows(plan) == ({} if loads else {2: (0, length)})
    driver.run()
    assert driver.cached_host[2] == driver.cached[2] == loads * 10


def test_a_second_request_for_the_same_prefix_waits_for_the_copy_and_starts_none():
    driver = demoted(device_pages=16)
    plan = driver.step(request(2, range(17), new=1), request(3, [*range(16), 99], new=1), request(4, [4] * 5))
    assert kinds(plan.transfers) == [("load", 4), ("backup", 1)] and rows(plan) == {4: (0, 5)}
    for _ in range(3):
        plan = driver.step(settle=0)
        assert [s.request.request_id for s in driver.scheduler.waiting] == [3]
        assert not any(transfer.kind == "load" for transfer in plan.transfers)
    driver.run()
    assert (driver.cached[2], driver.cached_host[2]) == (16, 16)
    assert (driver.cached[3], driver.cached_host[3]) == (16, 0), "when its turn came the device had them"
    assert counters(driver.scheduler)["loaded_pages"] == 4


def test_who_waits_for_anothers_copy_is_not_overtaken_for_ever():
    driver = demoted(device_pages=16, max_running_requests=100)
    driver.step(request(2, range(17), new=1), request(3, range(17), new=1))
    for i in range(40):
        driver.step(request(100 + i, [i], new=1), settle=0)
    assert [s.request.request_id for s in driver.scheduler.waiting][:2] == [3, 132]
    driver.run()
    assert len(driver.ends) == 2 + 2 + 40


def test_pages_that_were_filled_while_a_request_waited_for_its_load_are_its_own_too():
    """It looks again at what is cached when its copy has settled."""
    driver = demoted(device_pages=16)
    driver.step(request(2, range(30), new=1))
    driver.step(request(3, range(24), new=1, return_logprob=True, logprob_start=0), settle=0)
    assert on_host(driver, range(30)) == (6, 0)
    assert rows(driver.step())[2] == (24, 30)
    driver.run()
    assert driver.cached[2] == 24


def test_a_request_waits_outside_while_copies_hold_the_device():
    driver = small()
    driver.step(request(1, range(32), new=1))
    driver.step(settle=0)
    for _ in range(2):
        arrivals = [request(2, [2] * 20, new=1)] if 2 not in driver.truths else []
        assert driver.step(*arrivals, settle=0).empty
        assert [s.request.request_id for s in driver.scheduler.waiting] == [2]
    assert rows(driver.step()) == {2: (0, 20)}


def test_salts_part_the_host_as_they_part_the_device():
    driver = small()
    driver.run(request(1, range(17), new=1, salt="a"))
    fill_device(driver)
    assert rows(driver.step(request(2, range(17), new=1))) == {2: (0, 17)}
    driver.run()
    assert rows(driver.step(request(3, range(17), new=1, salt="b"))) == {3: (0, 17)}
    driver.run()
    driver.run(request(4, range(17), new=1, salt="a"))
    assert [driver.cached_host[i] for i in (2, 3, 4)] == [0, 0, 16]


@pytest.mark.parametrize("write_policy", POLICIES)
def test_without_host_pages_there_is_no_hierarchy(write_policy: str):
    """Every policy makes the same plans, and no copy."""
    driver, plain = small(host_pages=0, write_policy=write_policy), Driver(device_pages=8)
    for either in (driver, plain):
        either.run(*(request(i, range(i % 3, 20), new=9) for i in range(1, 7)))
    assert driver.scheduler.digest == plain.scheduler.digest
    assert counters(driver.scheduler)["backed_up_pages"] == 0 < counters(driver.scheduler)["evicted_pages"]
    assert host_books(driver) == (0, 0, 0)


def test_without_a_prefix_cache_nothing_is_copied():
    """sglang#9452: a hierarchy behind a cache that is switched off."""
    driver = small(cache_prefixes=False)
    for i in (1, 2):
        driver.run(request(i, range(17)))
    assert driver.cached[2] == 0 and driver.scheduler.hicache.next_transfer_id == 1


# ---- write policies ----


def test_write_through_copies_what_a_step_fills_after_that_step():
    driver = small()
    plan = driver.step(request(1, range(18), new=8))
    [backup] = plan.transfers
    assert (backup.kind, backup.device_pages) == ("backup", plan.spans[0].pages[:4])
    assert driver.step().empty is False, "18 tokens fill no page"
    [backup] = driver.step().transfers
    assert backup.device_pages == tuple(driver.scheduler.running[0].pages[4:5]), (
        "the answer's first full page"
    )
    driver.run()
    assert host_books(driver) == (26, 6, 0)


def test_a_prompt_that_comes_back_after_a_retraction_has_not_been_seen_twice():
    driver = decoding_trio(host_pages=30, write_policy="write_through_selective")
    driver.run()
    assert driver.scheduler.retractions > 0 and driver.scheduler.hicache.pages_backed_up == 0


def test_selective_copies_a_prefix_when_it_is_seen_again():
    driver = small(write_policy="write_through_selective")
    driver.run(request(1, range(17), new=8))
    assert host_books(driver) == (32, 0, 0)
    [backup] = driver.step(request(2, [*range(12), 77, 78], new=1)).transfers
    assert (backup.kind, len(backup.device_pages)) == ("backup", 3), "what both have, and no more"


def test_write_back_copies_what_is_about_to_go_and_lets_it_go_when_that_has_settled():
    driver = small(write_policy="write_back")
    driver.run(request(1, range(17), new=1))
    driver.run(request(2, range(17), new=1))
    assert host_books(driver) == (32, 0, 0) and driver.cached[2] == 16
    plan = driver.step(request(3, [3] * 31, new=1))
    assert kinds(plan.transfers) == [("backup", 4)] and not plan.spans
    assert driver.step(settle=0).empty and on_host(driver, range(17)) == (4, 0)
    assert rows(driver.step()) == {3: (0, 31)} and on_host(driver, range(17)) == (0, 4)
    driver.run()
    driver.run(request(4, range(17), new=1))
    assert driver.cached_host[4] == 16


def test_write_back_holds_up_only_who_needs_the_pages():
    driver = small(write_policy="write_back")
    driver.step(request(1, [1] * 3, new=13))
    driver.run_until_decoding(request(2, range(12), new=1))
    plan = driver.step(request(3, [3] * 16, new=1))
    assert rows(plan).keys() == {1} and kinds(plan.transfers) == [("backup", 3)]
    for _ in range(5):
        plan = driver.step(settle=0)
        assert rows(plan).keys() == {1} and not plan.transfers, "one write-back is enough for all of it"
    assert 3 in rows(driver.step())


def test_write_back_evicts_without_a_copy_what_the_host_has_or_has_no_room_for():
    driver = small(write_policy="write_back", host_pages=3)
    driver.run(request(1, range(17), new=1))
    plan = driver.step(request(2, [2] * 31, new=1))
    assert rows(plan) == {2: (0, 31)} and not plan.transfers, "4 pages in a host of 3"
    driver = small(write_policy="write_back")
    driver.run(request(1, range(17), new=1))
    fill_device(driver)
    driver.run(request(2, range(17), new=1))
    plan = driver.step(request(3, [3] * 16, new=1))
    assert rows(plan) == {3: (0, 16)} and not plan.transfers, (
        "the host has what goes first: its copy is as good"
    )


def test_pages_whose_write_back_is_in_use_again_are_not_counted_on():
    """Then others go at once, and nobody waits for a copy that frees nothing."""
    cache = Cache(page_size=4, pages=8, host_pages=16, write_policy="write_back")
    cache.insert("wxyz")
    assert cache.copies.take_device_pages(5) is None
    [first] = cache.settle()
    cache.insert("abcd")
    cache.tree.match(b"", cache.key("wxyz"), 1000)
    assert cache.copies.take_device_pages(1) is None
    [second] = cache.copies.plan()
    assert (len(first.device_pages), len(second.device_pages)) == (4, 4)
    assert cache.copies.take_device_pages(4) is None and cache.copies.plan() == (), "these four are coming"
    node, _ = cache.tree.match(b"", cache.key("abcd"), 1000)
    cache.tree.lock(node)
    assert len(cache.copies.take_device_pages(2)) == 2
    assert (cache.found("abcd"), cache.found("wxyz"), cache.found_on_host("wxyz")) == (4, 2, 2)


# ---- what is visible, and from when on ----


def test_a_backup_that_is_not_finished_is_not_found():
    """LMCache#4991, #207: a key that can be seen before its data is there."""
    cache = Cache(page_size=4, host_pages=8)
    cache.insert("abcd")
    node, _ = cache.tree.match(b"", cache.key("abcd"), 1000)
    cache.copies.matched(node)
    [transfer] = cache.copies.plan()
    assert cache.tree.host.pages_total == 0 and cache.host_allocator.available == 4
    assert cache.evicted(9) == [], "its source stays until it has settled"
    cache.copies.settle(TransferResult(transfer_id=transfer.transfer_id, ok=True))
    assert (cache.tree.host.pages_total, cache.tree.host.pages_unlocked) == (4, 4)


def test_a_backup_that_failed_leaves_nothing_and_is_tried_again_when_the_prefix_is_seen():
    """LMCache#4991: a store that failed and is still found."""
    driver = small()
    driver.step(request(1, range(17), new=1))
    assert host_books(driver) == (28, 0, 4)
    driver.step(fail=True)
    assert host_books(driver) == (32, 0, 0) and counters(driver.scheduler)["failed_copies"] == 1
    assert kinds(driver.step(request(2, range(17), new=1)).transfers) == [("backup", 4)]
    driver.step(fail=True)
    fill_device(driver)
    driver.run(request(3, range(17), new=1))
    assert driver.cached == {1: 0, 2: 16, 90: 0, 3: 0}


def test_a_load_that_failed_is_computed_and_the_hosts_pages_are_forgotten():
    """A damaged page fails its transfer for all: what could not be read once is not tried again."""
    driver = demoted()
    before = host_books(driver)
    driver.step(request(2, range(17), new=1))
    plan = driver.step(fail=True)
    assert rows(plan) == {2: (0, 17)}, "in the very entry that says so"
    assert kinds(plan.transfers) == [("backup", 4)], "what is computed anew is backed up anew"
    driver.step(settle=0)
    assert host_books(driver)[1] == before[1] - 4
    driver.run()
    assert (driver.cached[2], driver.cached_host[2]) == (0, 0) and driver.tokens[2] == driver.tokens[1]
    fill_device(driver, 91)
    driver.run(request(3, range(17), new=1))
    assert driver.cached_host[3] == 16, "the new copy is good"


def test_a_load_that_failed_takes_what_followed_it_on_the_host_with_it():
    cache = Cache(page_size=4, host_pages=16)
    for text in ("abcd", "abxy", "kl"):
        cache.insert(text)
        cache.back_up(text)
    assert len(cache.evicted(20)) == 8
    transfer = cache.load("ab")
    cache.copies.settle(TransferResult(transfer_id=transfer.transfer_id, ok=False))
    assert [cache.found_on_host(text) for text in ("abcd", "abxy", "kl")] == [0, 0, 2]
    assert cache.host_allocator.available == 16 - 2 and cache.allocator.available == 64


def test_a_load_that_failed_takes_all_of_a_node_that_the_device_has_in_part():
    cache = Cache(page_size=4, host_pages=16)
    cache.insert("abcd")
    cache.back_up("abcd")
    cache.evicted(9)
    transfer = cache.load("ab")
    cache.insert("abcd")
    assert len(cache.evicted(1)) == 1, "the path of the load is locked, and what follows is not"
    cache.copies.settle(TransferResult(transfer_id=transfer.transfer_id, ok=False))
    assert cache.tree.host.pages_total == 0 and cache.found("abcd") == 3


def test_a_load_that_failed_spares_what_is_in_use():
    """The host keeps a bad page whose path a sequence runs on; a later load of it fails again, and then it goes."""
    driver = demoted(device_pages=16)
    driver.step(request(2, range(17), new=1))
    driver.step(request(3, range(17), new=20, return_logprob=True, logprob_start=0), settle=0)
    assert on_host(driver, range(17)) == (4, 0), "3 has computed them, since it may not load them"
    driver.step(fail=True)
    assert on_host(driver, range(17)) == (4, 0) and driver.scheduler.cache.host.pages_total >= 4
    driver.run()
    assert driver.cached[2] == 16


# ---- ends in the middle of a copy ----


@pytest.mark.parametrize("fail", [False, True])
def test_an_abort_leaves_a_load_its_pages_until_it_has_settled(fail: bool):
    """LMCache#4185, vllm#18485: the late completion must find its books, and nobody else its pages."""
    driver = demoted()
    [load] = driver.step(request(2, range(17), new=1)).transfers
    driver.step(aborts=[2], settle=0)
    assert driver.ends[2].type == "abort" and not driver.scheduler.loading
    free = driver.scheduler.allocator.free_pages()
    assert not set(load.device_pages) & set(free) and driver.scheduler.cache.device.books().protected == 16
    for _ in range(3):
        driver.step(*([request(3, [3] * 9, new=1)] if 3 not in driver.truths else []), settle=0)
    driver.step(fail=fail)
    assert driver.scheduler.cache.device.books().protected == 0
    assert on_host(driver, range(17))[0] == (0 if fail else 4), "what came back can be used by the next"


def test_an_abort_leaves_a_backup_alone():
    driver = small()
    driver.step(request(1, range(17), new=9))
    driver.step(aborts=[1], settle=0)
    driver.step(settle=0)
    assert driver.scheduler.cache.device.books().protected == 16 and host_books(driver) == (28, 0, 4)
    driver.step()
    assert driver.scheduler.cache.device.books().protected == 0 and host_books(driver) == (28, 4, 0)


def test_nobody_waits_for_a_copy_that_frees_nothing():
    """Its path is a running sequence's, so its end frees nothing: somebody gives way, as without a host tier."""
    driver = decoding_trio(host_pages=30)
    for _ in range(20):
        driver.step(settle=0)
    assert driver.scheduler.retractions == 1
    driver.run()
    assert [len(driver.tokens[i]) for i in (1, 2, 3)] == [20, 20, 20]


def test_a_sequence_waits_for_pages_that_only_a_copy_holds():
    """The first request's pages are still being backed up; when that has settled they can be evicted."""
    driver = Driver(device_pages=6, host_pages=30)
    driver.step(request(1, range(16), new=1), settle=0)
    driver.step(request(2, [2] * 12, new=4), settle=0)
    assert driver.scheduler.waiting and not driver.scheduler.running, (
        "four of six pages are locked by the copy"
    )
    driver.run()
    assert len(driver.tokens[2]) == 4 and driver.scheduler.retractions == 0


def test_nobody_waits_for_a_load_that_another_sequence_waits_for():
    """When it ends, its pages are the other's."""
    driver = demoted(device_pages=12)
    driver.run_until_decoding(request(5, [5] * 8, new=20), request(6, [6] * 8, new=20))
    driver.step(request(2, range(17), new=1), settle=0)
    assert driver.scheduler.loading
    for _ in range(30):
        driver.step(settle=0)
    assert driver.scheduler.retractions == 1 and driver.scheduler.loading
    driver.run()
    assert [len(driver.tokens[i]) for i in (5, 6, 2)] == [20, 20, 1]


def test_a_sequence_that_loads_is_not_retracted():
    driver = demoted(device_pages=8, host_pages=32)
    driver.step(request(5, [5] * 4, new=17))
    driver.step(request(2, range(17), new=1), settle=0)
    assert driver.scheduler.loading
    for _ in range(20):
        driver.step(settle=0)
        assert driver.scheduler.loading
    driver.run()
    assert (len(driver.tokens[5]), len(driver.tokens[2])) == (17, 1)


def test_a_flush_is_refused_while_anything_is_under_way():
    """sglang#27446. Whoever asks may ask again: copies end by themselves."""
    driver = small()
    driver.step(request(1, range(17), new=1))
    assert driver.step(settle=0).emissions[0].finish is not None
    [failure] = driver.step(settle=0, flush=True).control_failures
    assert failure.message == "not flushed: 0 requests, 0 steps and 1 copies are under way"
    driver.step()
    [control] = driver.step(flush=True).controls
    assert control.control_id == 7 and host_books(driver) == (32, 0, 0)
    assert driver.scheduler.cache.device.books().available == driver.scheduler.cache.device.books().capacity
    driver.run(request(2, range(17), new=1))
    assert driver.cached[2] == 0


def test_a_page_that_cannot_be_written_back_is_dropped():
    """However often backups fail, a sequence that needs the pages gets them."""
    driver = Driver(device_pages=8, host_pages=64, write_policy="write_back")
    driver.run(request(1, range(30), new=1))
    driver.step(request(2, [2] * 30, new=1), fail=True)
    steps = 0
    while driver.scheduler.live:
        driver.step(fail=True)
        steps += 1
        assert steps < 50, "request 2 never gets the pages whose backup fails"
    assert driver.scheduler.hicache.failures > 0 and len(driver.tokens[2]) == 1


def test_a_flush_forgets_what_was_still_to_be_backed_up():
    driver = small()
    driver.step(request(1, range(17), new=1))
    driver.step(settle=0)
    driver.run(request(2, range(17), new=1))
    driver.step(flush=True)
    assert driver.step().empty and host_books(driver) == (32, 0, 0)


# ---- pinned pages ----


def test_host_pages_are_pinned_until_their_load_has_settled_on_all_ranks():
    """sglang#31427, #26728: evicted from the host while the load was only queued."""
    driver = demoted(device_pages=16, host_pages=20)
    [load] = driver.step(request(2, range(17), new=1)).transfers
    for i in range(3, 9):  # Each of these wants room on the host.
        driver.step(request(i, [i] * 9, new=1), settle=0)
        held = driver.scheduler.hicache.under_way[load.transfer_id]
        assert [page for _, node in driver.scheduler.cache.path(held.node) for page in node.held[HOST]] == [
            *load.host_pages
        ]
    driver.run()
    assert driver.cached_host[2] == 16 and host_books(driver)[2] == 0


@pytest.mark.parametrize("write_policy", POLICIES)
@pytest.mark.parametrize("settle", [0, 1])
def test_both_tiers_always_full(write_policy: str, settle: int):
    """sglang#31427's traffic: 8 prompts of 112 tokens, 3 at a time, device 256, host 512, slow copies."""
    draw = Random(3)
    driver = Driver(
        page_size=16, device_pages=16, host_pages=32, write_policy=write_policy, max_running_requests=3
    )
    for number in range(120):
        driver.step(request(number, [draw.randrange(8)] * 112, new=8), settle=settle if number % 4 else 1000)
        while len(driver.scheduler.live) >= 3:
            driver.step(settle=1 if driver.scheduler.step % 3 == 0 else settle)
    driver.run()
    assert len({tuple(driver.tokens[number]) for number in range(120)}) == 1
    assert host_books(driver)[2] == 0 and driver.scheduler.cache.device.books().protected == 0
    assert counters(driver.scheduler)["loaded_pages"] > 0


# ---- eviction from the host ----


def test_the_host_evicts_the_deepest_page_of_the_oldest_prefix_first():
    cache = Cache(page_size=4, host_pages=16)
    cache.insert("abc")
    cache.insert("xyz")
    xyz, abc = cache.back_up("xyz"), cache.back_up("abc")
    cache.evicted(9)
    assert cache.evicted(4, HOST) == [xyz[2], xyz[1], xyz[0], abc[2]]
    assert cache.found_on_host("abc") == 2


def test_the_host_evicts_what_the_device_has_too_after_all_else():
    cache = Cache(page_size=4, host_pages=16)
    cache.insert("abc")
    cache.insert("xyz")
    abc, xyz = cache.back_up("abc"), cache.back_up("xyz")
    node, _ = cache.tree.match(b"", cache.key("abc"), 1000)
    cache.tree.match(b"", cache.key("xyz"), 1000)
    cache.tree.lock(node)
    assert len(cache.evicted(9)) == 3
    cache.tree.unlock(node)
    assert cache.evicted(5, HOST) == [xyz[2], xyz[1], xyz[0], abc[2], abc[1]], "abc is older, but a mirror"
    assert cache.found("abc") == 3 and (cache.tree.host.pages_evicted, cache.tree.host.pages_kept) == (5, 2)


def test_the_part_of_a_node_that_the_device_has_is_a_mirror_the_rest_is_not():
    cache = Cache(page_size=4, host_pages=16)
    cache.insert("abcd")
    abcd = cache.back_up("abcd")
    assert len(cache.evicted(2)) == 2
    cache.insert("xy")
    xy = cache.back_up("xy")
    node, _ = cache.tree.match(b"", cache.key("ab"), 1000)
    cache.tree.lock(node)
    assert len(cache.evicted(2)) == 2
    cache.tree.unlock(node)
    assert cache.evicted(6, HOST) == [abcd[3], abcd[2], xy[1], xy[0], abcd[1], abcd[0]]


def test_a_mirror_whose_device_page_goes_stands_in_line_as_such():
    """It was queued behind all else, and must not stay there."""
    cache = Cache(page_size=4, host_pages=16)
    cache.insert("ab")
    cache.insert("xy")
    xy, ab = cache.back_up("xy"), cache.back_up("ab")
    assert cache.evicted(1, HOST) == [xy[1]], "two mirrors: the older one's end"
    assert len(cache.evicted(3)) == 3, "y, which nobody has any more, then x, then b"
    assert cache.evicted(3, HOST) == [xy[0], ab[1], ab[0]]


def test_a_host_smaller_than_the_device_drops_mirrors_for_what_is_new():
    """Else it would fill with copies of what the device has, and take no more."""
    driver = Driver(device_pages=32, host_pages=8)
    for i in range(1, 5):
        driver.run(request(i, [i] * 17, new=1))
    counted = counters(driver.scheduler)
    assert (counted["dropped_mirror_pages"], counted["host_evicted_pages"]) == (8, 0)
    assert counted["backed_up_pages"] == 16 and counted["evicted_pages"] == 0
    driver.run(request(9, [1] * 17, new=1))
    assert driver.cached[9] == 16, "the device has it still"


# ---- the host holds a beginning of each path ----


def test_a_backup_takes_the_beginning_of_a_path_as_far_as_there_is_room():
    driver = small(host_pages=3)
    [backup] = driver.step(request(1, range(25), new=1)).transfers
    assert backup.device_pages == driver.in_flight[-1].spans[0].pages[:3]
    driver.run()
    assert host_books(driver) == (0, 3, 0)
    cache = Cache(page_size=4, host_pages=3)
    cache.insert("abcdef")
    cache.back_up("abcdef")
    assert len(cache.evicted(9)) == 6 and cache.found_on_host("abcdef") == 3


def test_a_child_is_backed_up_behind_its_parent():
    cache = Cache(page_size=4, host_pages=16)
    cache.insert("ab")
    cache.insert("abcd")
    pages = cache.back_up("abcd")
    cache.evicted(9)
    assert len(pages) == 4 and cache.found_on_host("abcd") == 4


def test_a_path_does_not_evict_its_own_beginning_to_back_up_its_end():
    cache = Cache(page_size=4, host_pages=3)
    cache.insert("ab")
    ab = cache.back_up("ab")
    cache.insert("abcdef")
    assert len(cache.back_up("abcdef")) == 1, "one page of room, and two pages that it stands on"
    assert [page for node in cache.tree.nodes() for page in node.held[HOST]][:2] == ab


@pytest.mark.parametrize("write_policy", POLICIES)
def test_families_larger_than_the_host(write_policy: str):
    """sglang#16909, #28614: parents of 208 tokens, children of 32, a host of 64; the chain never breaks."""
    driver = Driver(page_size=16, device_pages=64, host_pages=4, write_policy=write_policy)
    for number in range(90):
        family = number % 30
        prompt = [family, *range(207), *[number % 7] * 32]
        driver.step(request(number, prompt, new=4), settle=number % 3)
        while len(driver.scheduler.live) >= 4:
            driver.step(settle=1)
    driver.run()
    assert all(len(driver.tokens[number]) == 4 for number in range(90))
    assert driver.scheduler.cache.device.books().protected == host_books(driver)[2] == 0


# ---- nodes that change under a copy ----


def test_one_long_answer_stays_one_node_while_its_beginning_is_copied():
    driver = Driver(host_pages=32)
    driver.step(request(1, range(8), new=30))
    for _ in range(20):
        driver.step(settle=0)
    assert [len(node.held[DEVICE]) for node in driver.scheduler.cache.nodes()] == [7]
    assert len(driver.copies) == 1, "one copy at a time covers a node"
    driver.step(settle=1)
    assert kinds(tuple(driver.copies.values())) == [("backup", 5)], (
        "and the next takes all that came meanwhile"
    )
    driver.run()
    assert host_books(driver)[1] == (8 + 30 - 1) // 4


def test_a_node_that_is_split_under_its_backup_gets_all_of_it():
    driver = small()
    driver.step(request(1, range(17), new=1))
    driver.step(request(2, [*range(6), 99], new=1), settle=0)
    assert [len(node.held[DEVICE]) for node in driver.scheduler.cache.nodes()] == [1, 3]
    driver.run()
    assert [len(node.held[HOST]) for node in driver.scheduler.cache.nodes()] == [1, 3]


def test_what_was_computed_during_its_load_stays_and_the_copys_page_is_free_again():
    cache = Cache(page_size=4, host_pages=16)
    cache.insert("abcd")
    cache.back_up("abcd")
    cache.evicted(9)
    transfer = cache.load("abcd")
    computed = cache.insert("ab")
    assert cache.found("abcd") == 2
    assert cache.copies.settle(TransferResult(transfer_id=transfer.transfer_id, ok=True)) == 4
    _, pages = cache.tree.match(b"", cache.key("abcd"), 1000)
    assert pages == [*computed, *transfer.device_pages[2:]]
    assert set(transfer.device_pages[:2]) <= set(cache.allocator.free_pages())


def test_a_copy_that_is_not_under_way_cannot_settle():
    cache = Cache(host_pages=4)
    with pytest.raises(AssertionError, match="transfer 5 settled, but it is not under way"):
        cache.copies.settle(TransferResult(transfer_id=5, ok=True))


# ---- the digest ----


def test_a_copy_that_failed_and_one_that_did_not_are_told_apart():
    digests = []
    for ok in (True, False):
        scheduler = Scheduler(capacity(host_pages=9))
        scheduler.apply(Entry(step=1, arrivals=(request(1, range(17), new=1),)))
        scheduler.apply(Entry(step=2, settled=(TransferResult(transfer_id=1, ok=ok),)))
        digests.append(scheduler.digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("host_counts", [True, False])
def test_without_host_counts_replicas_part_where_they_decide_differently(host_counts: bool):
    """sglang#29258 as it was met: nothing compares the capacities, but the first decision that they change tells."""
    pair = [Driver(device_pages=8, host_pages=pages, host_counts=host_counts) for pages in (6, 7)]
    for number in range(1, 9):
        for driver in pair:
            driver.run(request(number, [number] * 9, new=1))
        if pair[0].scheduler.digest != pair[1].scheduler.digest:
            break
    vectors = [driver.scheduler.state.numbers for driver in pair]
    first = [one != other for one, other in zip(*vectors, strict=True)].index(True)
    assert number == (1 if host_counts else 4), "three prompts of two pages fit both hosts"
    assert STATE_FIELDS[first] == ("host pages available" if host_counts else "mirrors dropped")
