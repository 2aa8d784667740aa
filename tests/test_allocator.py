"""The allocator's books: every page is free or held, as often as its holders are many."""

from __future__ import annotations

import random

import pytest

from engine.mem_cache.allocator import PageAllocator
from engine.scheduler.digest import Accumulator, hash_events


def test_pages_are_given_out_first_in_first_out():
    allocator = PageAllocator(4, Accumulator())
    assert allocator.allocate(3) == [0, 1, 2]
    allocator.release([1, 0])
    assert allocator.allocate(3) == [3, 1, 0]
    assert allocator.available == 0 and allocator.allocate(0) == []


def test_a_page_is_free_when_its_last_holder_lets_go():
    allocator = PageAllocator(1, Accumulator())
    allocator.allocate(1)
    allocator.hold([0])
    allocator.release([0])
    assert allocator.available == 0
    allocator.release([0])
    assert allocator.available == 1


def test_a_page_that_a_step_names_is_let_go_when_that_step_retires():
    allocator = PageAllocator(3, Accumulator())
    allocator.allocate(3)
    allocator.release_after(5, 2)
    allocator.release_after(5, 0)
    allocator.release_after(7, 1)
    assert (allocator.available, allocator.pending, allocator.pending_pages()) == (0, 3, [2, 0, 1])
    allocator.retire(4)
    assert allocator.available == 0
    allocator.retire(5)
    assert allocator.free_pages() == [2, 0] and allocator.pending == 1
    allocator.retire(9)
    assert allocator.free_pages() == [2, 0, 1] and allocator.pending == 0


def test_what_a_programmer_must_not_do():
    allocator = PageAllocator(2, Accumulator())
    with pytest.raises(AssertionError, match="3 pages asked, 2 available"):
        allocator.allocate(3)
    with pytest.raises(AssertionError, match="page 0 released, but it has no holder"):
        allocator.release([0])
    with pytest.raises(AssertionError, match="page 1 is free and cannot be shared"):
        allocator.hold([1])
    allocator.allocate(2)
    allocator.release_after(5, 0)
    with pytest.raises(AssertionError, match="step 4"):
        allocator.release_after(4, 1)


def test_each_event_is_part_of_the_digest():
    values = []
    for act in (
        lambda a: a.allocate(2),
        lambda a: a.allocate(3),
        lambda a: a.release(a.allocate(2)),
        lambda a: a.release(reversed(a.allocate(2))),
        lambda a: (a.release([a.allocate(1)[0]]), a.allocate(2)),
    ):
        events = Accumulator()
        act(PageAllocator(4, events))
        values.append(hash_events(events.take()))
    assert len(set(values)) == len(values)


def test_every_page_given_out_is_part_of_the_digest():
    values = []
    for middle in ([1, 2], [2, 1]):
        events = Accumulator()
        allocator = PageAllocator(4, events)
        allocator.allocate(4)
        allocator.release([0, *middle, 3])
        events.take()  # As if the order had come about unseen.
        allocator.allocate(4)
        values.append(hash_events(events.take()))
    assert values[0] != values[1]


def test_ten_thousand_random_acts_against_a_list_of_holders():
    draw, events = random.Random(1), Accumulator()
    allocator = PageAllocator(50, events)
    holders: list[int] = []
    pending: list[tuple[int, int]] = []
    step = 0
    for _ in range(10_000):
        act = draw.randrange(5)
        if act == 0 and allocator.available:
            holders += allocator.allocate(draw.randint(1, allocator.available))
        elif act == 1 and holders:
            shared = [draw.choice(holders)] * draw.randint(1, 2)
            allocator.hold(shared)
            holders += shared
        elif act == 2 and holders:
            draw.shuffle(holders)
            count = draw.randint(1, len(holders))
            allocator.release(holders[:count])
            del holders[:count]
        elif act == 3 and holders:
            step += draw.randint(0, 2)
            pending.append((step, holders.pop()))
            allocator.release_after(*pending[-1])
        elif act == 4:
            retired = step - draw.randint(0, 3)
            allocator.retire(retired)
            pending = [(at, page) for at, page in pending if at > retired]
        everyone = holders + [page for _, page in pending]
        assert allocator.references == [everyone.count(page) for page in range(50)]
        assert sorted(allocator.free_pages()) == [p for p in range(50) if p not in everyone]
        assert allocator.pending == len(pending)
