"""Who is let in and who is sent back: admission, fairness, retraction, and public faults of these."""

from __future__ import annotations

from random import Random

import pytest

from tests.sim.single import Driver, decoding_trio, request, rows

# ---- admission ----


def test_all_slots_are_used_and_a_freed_one_is_taken_at_once():
    """sglang#35537: four long prompts, four slots, small chunks: all four run; the fifth starts when one ends."""
    driver = Driver(max_running_requests=4, chunk_tokens=32, page_size=1, device_pages=2600)
    driver.step(*(request(i, [i] * 100, new=400 if i > 1 else 60) for i in range(1, 6)))
    for _ in range(20):
        driver.step()
    assert len(driver.scheduler.running) == 4
    while 1 not in driver.ends:
        assert len(driver.scheduler.running) == 4
        plan = driver.step()
    assert 5 in rows(plan)


def test_requests_that_just_fit_together_run_together():
    """The last token of an answer has no KV, in the reserve for growth as in the rule at the door."""
    driver = Driver(page_size=16, device_pages=3 * 6, growth_tokens=64, chunk_tokens=1000)
    driver.step(*(request(i, [i] * 80, new=17) for i in range(1, 4)))
    assert len(driver.scheduler.running) == 3
    driver.run()
    assert driver.scheduler.retractions == 0


def test_admission_leaves_room_for_growth():
    driver = Driver(page_size=1, device_pages=100, growth_tokens=20)
    driver.step(request(1, [1] * 40, new=50))
    driver.step(request(2, [2] * 41, new=2))
    assert [s.request.request_id for s in driver.scheduler.running] == [1], (
        "40 + 1 + 20 + 41 is more than 100"
    )
    driver.step(aborts=[2])
    driver.step(request(3, [3] * 37, new=2))
    assert [s.request.request_id for s in driver.scheduler.running] == [1, 3]


def test_cached_pages_that_a_prompt_needs_are_no_room_for_it():
    driver = Driver(page_size=1, device_pages=20)
    driver.run(request(1, range(10), new=1))
    driver.step(request(2, range(50, 58), new=5))
    driver.step(request(3, range(13), new=1))
    assert len(driver.scheduler.running) == 1, "2 pages are free, and the 10 others are its own prefix"
    driver.run()
    assert driver.cached[3] == 8, "request 2 grew to 12 rows and took the last two"


def test_a_large_prompt_is_not_starved_by_small_ones():
    """vllm#40004: one 400-token prompt waits while 10-token ones arrive without end."""
    driver = Driver(page_size=1, device_pages=512, chunk_tokens=64)
    for i in range(2, 10):
        driver.step(request(i, [i] * 100, new=20))
    number, waited = 10, 0
    driver.step(request(1, range(400), new=4))
    while 1 not in driver.ends:
        driver.step(request(number, [number] * 10, new=20))
        number, waited = number + 1, waited + 1
        assert waited < 100


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_cold_prompt_is_not_starved_by_cached_ones(policy: str):
    """vllm#31731: under lpm each newcomer has a longer cached prefix; after 32 of them it is the cold one's turn."""
    driver = Driver(policy=policy, page_size=1, max_running_requests=2, device_pages=500)
    driver.run(request(1, range(50), new=2))
    driver.step(*(request(i, [*range(50), i], new=2) for i in range(10, 20)), request(2, [9] * 20, new=2))
    number = 100
    while 2 not in driver.ends:
        driver.step(request(number, [*range(50), number], new=2))
        number += 1
        assert number < 100 + 60


def test_lpm_takes_the_longest_cached_prefix_first():
    driver = Driver(policy="lpm", max_running_requests=1)
    driver.run(request(1, range(20), new=1))
    driver.step(request(2, [7] * 8, new=1), request(3, range(12), new=1), request(4, range(24), new=1))
    order = [next(iter(rows(driver.in_flight[-1])))]
    for _ in range(2):
        order += rows(driver.step())
    assert order == [4, 3, 2]


# ---- retraction ----


def test_the_latest_arrival_is_retracted_and_comes_back_with_its_tokens():
    """sglang#39645, #20724: the answer is not a splice of two generations."""
    driver = decoding_trio()
    for _ in range(4):
        assert set(rows(driver.step())) == {1, 2, 3}
    assert set(rows(driver.step())) == {1, 2}
    [waiting] = driver.scheduler.waiting
    assert (waiting.request.request_id, waiting.retractions, waiting.generated) == (3, 1, 5)
    driver.run()
    assert driver.tokens[3] == [100 + position for position in range(8, 28)]
    assert driver.scheduler.retractions >= 1 and driver.cached[3] == 0, (
        "cached tokens are those of the first time"
    )


def test_the_retracted_one_waits_before_all_who_came_later():
    driver = decoding_trio(max_running_requests=3)
    driver.step(request(4, [4] * 8, new=20))
    while driver.scheduler.retractions == 0:
        driver.step()
    assert [sequence.request.request_id for sequence in driver.scheduler.waiting] == [3, 4]


def test_the_oldest_is_never_retracted():
    driver = Driver(page_size=1, device_pages=60, max_running_requests=16)
    oldest = 0
    driver.step(*(request(i, [i] * 10, new=40) for i in range(1, 6)))
    while driver.scheduler.live:
        running = driver.scheduler.running
        oldest = running[0].number if running else oldest
        driver.step()
        assert all(sequence.number != oldest for sequence in driver.scheduler.waiting)
    assert driver.scheduler.retractions > 0


def test_a_sequence_with_a_span_in_flight_is_not_retracted():
    driver = Driver(page_size=4, device_pages=9, depth=2)
    driver.step(*(request(i, [i] * 8, new=12) for i in (1, 2, 3)))
    driver.step(retire=1)
    driver.step(retire=0)
    for _ in range(3):
        driver.step(retire=1)
        driver.step(retire=1)
    assert rows(driver.in_flight[0]) == {1: (11, 12), 2: (11, 12)}
    assert rows(driver.in_flight[1]) == {3: (11, 12)}, "the latest arrival, but under way"
    driver.step(retire=1)
    assert [sequence.request.request_id for sequence in driver.scheduler.waiting] == [2]


def test_pages_that_come_free_by_themselves_are_waited_for():
    """One sequence has ended but its step has not retired: nobody is retracted meanwhile."""
    driver = Driver(page_size=4, device_pages=9, depth=2)
    driver.step(*(request(i, [i] * 8, new=8) for i in (1, 2, 3)))
    assert rows(driver.step(retire=1)) == {1: (8, 9), 2: (8, 9)}
    assert rows(driver.step(retire=0)) == {3: (8, 9)}
    for _ in range(3):
        decoded, other = driver.step(retire=1), driver.step(retire=1)
    assert rows(decoded) == {1: (11, 12), 2: (11, 12)} and rows(other) == {3: (11, 12)}
    assert driver.step(retire=1, aborts=[3]).empty, (
        "1 and 2 need a page each, and those of 3 are still in use"
    )
    assert driver.scheduler.retractions == 0
    assert rows(driver.step(retire=1)) == {1: (12, 13)}
    assert rows(driver.step(retire=0)) == {2: (12, 13)}
    assert driver.scheduler.retractions == 0


def test_a_retracted_prefill_tells_each_prompt_logprob_once():
    driver = Driver(page_size=1, device_pages=40, chunk_tokens=2)
    driver.step(request(1, [1] * 10, new=30))
    for _ in range(6):
        driver.step()
    driver.step(request(2, range(2, 18), new=3, return_logprob=True, logprob_start=0))
    while driver.scheduler.retractions == 0:
        driver.step()
    assert driver.scheduler.waiting[0].generated == 0
    driver.run()
    assert driver.truths[2].positions_told == list(range(1, 16)) and len(driver.tokens[2]) == 3


# ---- whole days ----


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [16, 64, 1000])
def test_forced_retractions_leave_every_answer_whole(chunk: int, caching: bool, depth: int):
    """sglang#39645, #20724, #14972: 8 x 140 tokens in a pool of 512; each token once, each log probability once."""
    counts = {"page_size": 16, "device_pages": 32, "chunk_tokens": chunk, "depth": depth}
    driver = Driver(cache_prefixes=caching, **counts)
    driver.token = lambda span: span.request_id * 1000 + span.end
    driver.run(*(request(i, [i] * 40, new=100, return_logprob=True, logprob_start=0) for i in range(1, 9)))
    assert driver.scheduler.retractions > 0
    for i in range(1, 9):
        assert driver.tokens[i] == [i * 1000 + position for position in range(40, 140)]
        assert driver.truths[i].positions_told == list(range(1, 40)) and driver.ends[i].type == "length"


def test_retracted_sequences_find_their_own_pages_again():
    """nano-vllm#211, #233: 32 prompts that share 64 tokens, in a pool of 256: hits and retractions together."""
    driver = Driver(page_size=16, device_pages=16, max_running_requests=32, chunk_tokens=256)
    driver.token = lambda span: span.request_id * 1000 + span.end
    driver.run(*(request(i, [*range(64), i], new=60) for i in range(1, 33)), steps_max=3000)
    assert driver.scheduler.retractions > 0 and set(driver.cached.values()) == {0, 64}
    for i in range(1, 33):
        assert driver.tokens[i] == [i * 1000 + position for position in range(65, 125)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_two_equal_prompts_keep_their_pages_while_others_take_what_comes_free(page_size: int):
    """mini-sglang#142: freed duplicates are taken at once by ten unrelated prompts."""
    driver = Driver(
        page_size=page_size, device_pages=400 // page_size, chunk_tokens=32, max_running_requests=16
    )
    driver.step(*(request(i, range(96), new=120) for i in (1, 2)))
    for i in range(10, 20):
        driver.step(request(i, [i] * 60, new=4))
    driver.run()
    assert driver.tokens[1] == driver.tokens[2] and len(driver.tokens[1]) == 120


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_the_books_balance_on_a_busy_day(page_size: int):
    """sglang#35270, #10637, #11970: 256 requests, 8 prefixes, aborts; idle means that nothing is protected."""
    draw = Random(page_size)
    driver = Driver(
        page_size=page_size, device_pages=1024 // page_size, max_running_requests=16, chunk_tokens=128
    )
    driver.token = lambda span: draw.randrange(5)
    prefixes = [[i] * length for i, length in enumerate((5, 16, 31, 33, 100, 5, 16, 31))]
    for number in range(256):
        prompt = draw.choice(prefixes) + [draw.randrange(5) for _ in range(draw.randint(0, 80))]
        aborted = [draw.randrange(number + 1)] if draw.random() < 0.1 else []
        driver.step(request(number, prompt, new=draw.randint(1, 70)), aborts=aborted)
        while len(driver.scheduler.live) >= 16:
            driver.step()
    driver.run()
    books = driver.scheduler.cache.device.books()
    assert books.protected == 0 and books.available + books.evictable == books.capacity == 1024
    driver.step(flush=True)
    assert driver.scheduler.cache.device.books().available == 1024
