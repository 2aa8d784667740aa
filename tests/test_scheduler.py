"""The scheduler, one decision at a time: chunks, pacing, admission, retraction, ends, flush, and public faults."""

from __future__ import annotations

import pytest

from engine.types import Entry, Finish, RetiredStep
from tests.sim.single import Driver, request, rows

# ---- chunks, decode rows, micro-batches ----


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline():
    driver = Driver(depth=2, chunk_tokens=16)
    assert rows(driver.step(request(1, range(40)))) == {1: (0, 16)}
    assert rows(driver.step(retire=0)) == {1: (16, 32)}, "the second chunk does not wait for the first"
    assert rows(driver.step(retire=0)) == {}, "two steps are in flight, and that is the depth"
    last = driver.step(retire=1)
    assert rows(last) == {1: (32, 40)} and last.spans[0].sample is not None
    assert rows(driver.step(retire=1)) == {}, "the next id is not known yet"
    assert rows(driver.step(retire=1)) == {1: (40, 41)}


def test_decode_rows_are_shared_evenly_between_the_steps_in_flight():
    driver = Driver(depth=2)
    driver.step(*(request(i, [i] * 4, new=20) for i in range(1, 6)))
    first, second = driver.step(retire=1), driver.step(retire=0)
    assert [len(first.spans), len(second.spans)] == [3, 2]
    for _ in range(4):
        assert rows(driver.step(retire=1)).keys() == rows(first).keys()
        assert rows(driver.step(retire=1)).keys() == rows(second).keys()


def test_a_chunk_takes_the_rows_that_decoding_leaves_and_need_not_end_at_a_page():
    driver = Driver(chunk_tokens=8, page_size=4)
    driver.step(request(1, range(5), new=20))
    assert rows(driver.step(request(2, range(50, 70)))) == {1: (5, 6), 2: (0, 7)}
    assert rows(driver.step()) == {1: (6, 7), 2: (7, 14)}


def test_a_prefill_moves_by_a_page_however_many_sequences_decode():
    driver = Driver(chunk_tokens=4, page_size=4)
    driver.run_until_decoding(*(request(i, [i] * 4, new=50) for i in range(1, 7)))
    assert rows(driver.step(request(9, range(20))))[9] == (0, 4)
    assert rows(driver.step())[9] == (4, 8)


def test_two_prefills_share_a_step_and_the_older_goes_first():
    driver = Driver(chunk_tokens=12)
    assert rows(driver.step(request(1, range(20)), request(2, range(50, 60)))) == {1: (0, 12)}
    assert rows(driver.step()) == {1: (12, 20), 2: (0, 4)}
    assert rows(driver.step()) == {1: (20, 21), 2: (4, 10)}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [16, 64, 100, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_any_chunk_goes_with_any_page_in_a_pool_that_just_fits(page_size: int, chunk: int, caching: bool):
    """sglang#2255, #7397, #5081, #6046, #6888: chunk remainders and page rounding."""
    pages = 3 * -(-80 // page_size)
    driver = Driver(page_size=page_size, chunk_tokens=max(chunk, page_size), device_pages=pages, cache_prefixes=caching)
    driver.run(*(request(i, [i % 7, *range(79)], new=1) for i in range(1, 21)))
    assert [len(driver.tokens[i]) for i in range(1, 21)] == [1] * 20
    assert driver.scheduler.books().protected == 0


# ---- what the cache gives ----


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_full_repeat_computes_at_least_one_token(length: int, page_size: int):
    """nano-vllm#144, #114: a prompt that is cached as a whole still needs logits."""
    driver = Driver(page_size=page_size, device_pages=200)
    right = (length - 1) // page_size * page_size
    driver.run(request(1, range(length)))
    driver.run(request(2, range(length)))
    assert driver.cached == {1: 0, 2: right}
    driver.run(request(3, range(length)), request(4, range(length)))
    assert driver.cached[3] == driver.cached[4] == right
    assert driver.tokens[1] == driver.tokens[2] == driver.tokens[3] == driver.tokens[4]


def test_identical_prompts_that_arrive_together_are_computed_once():
    """vllm#14326: with n = 4, three of the four read what the first computes."""
    driver = Driver(page_size=4)
    first = driver.step(*(request(i, range(10)) for i in range(1, 5)))
    assert rows(first) == {1: (0, 10)}, "the others wait one step for its pages"
    assert rows(driver.step()) == {1: (10, 11), 2: (8, 10), 3: (8, 10), 4: (8, 10)}
    driver.run()
    assert driver.cached == {1: 0, 2: 8, 3: 8, 4: 8}


def test_a_prompt_whose_pages_were_filled_long_ago_does_not_wait_for_the_answer_that_follows_them():
    """sglang#35537: slots free but nobody admitted. With pages of 1 every decode row fills a page of that node."""
    driver = Driver(page_size=1, device_pages=300)
    driver.step(request(1, range(8), new=100))
    driver.step()
    assert rows(driver.step(request(2, range(8))))[2] == (7, 8)


def test_a_prompt_that_spells_a_running_answer_waits_one_step_at_most():
    driver = Driver(page_size=1, device_pages=300)
    driver.step(request(1, range(8), new=100))
    driver.step()
    follow_up = [*range(8), *(100 + position for position in range(8, 60))]
    assert 2 not in rows(driver.step(request(2, follow_up)))
    assert rows(driver.step())[2][1] == 60


def test_the_answer_is_cached_but_for_its_last_token():
    driver = Driver(page_size=1)
    driver.run(request(1, range(5), new=4))
    assert driver.scheduler.books().evictable == 5 + 4 - 1
    driver.run(request(2, [*range(5), *driver.tokens[1], 7]))
    assert driver.cached[2] == 5 + 4 - 1


def test_prompts_under_different_salts_share_nothing():
    driver = Driver()
    driver.run(request(1, range(20)))
    driver.run(request(2, range(20), salt="a"))
    driver.run(request(3, range(20), salt="b"))
    driver.run(request(4, range(20), salt="a"))
    assert driver.cached == {1: 0, 2: 0, 3: 0, 4: 16}


def test_the_cache_is_read_only_up_to_the_first_wanted_prompt_logprob():
    driver = Driver(page_size=1)
    driver.run(request(1, range(20)))
    driver.step(request(2, range(20), return_logprob=True, logprob_start=12))
    span = driver.in_flight[-1].spans[0]
    assert (span.start, span.logprob_start) == (11, 12), "the row of position 11 gives that of 12"
    assert span.logprob_targets == tuple(range(12, 20))


def test_prompt_logprobs_come_once_over_chunks_and_never_for_position_0():
    driver = Driver(chunk_tokens=8)
    told = []
    driver.step(request(1, range(30), return_logprob=True, logprob_start=0, top_logprobs=2))
    while driver.scheduler.live:
        for span in driver.in_flight[-1].spans:
            assert span.top_logprobs == 2
            told += [span.logprob_start + j for j in range(len(span.logprob_targets))]
        driver.step()
    assert told == list(range(1, 30))


def test_a_duplicate_page_is_named_until_its_step_retires_and_never_again():
    """mini-sglang#142: two requests fill the same page; the later one's table must be repointed before it is freed."""
    driver = Driver(page_size=4, depth=2)
    [first] = driver.step(request(1, range(8))).spans
    [second] = driver.step(request(2, range(8)), retire=0).spans
    assert second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]
    driver.step(retire=1)
    assert driver.scheduler.allocator.pending_pages() == [second.pages[1]]
    [after] = driver.step(retire=1).spans
    assert after.request_id == 2 and after.pages[:2] == first.pages
    assert second.pages[1] in driver.scheduler.allocator.free_pages()


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
    assert [s.request.request_id for s in driver.scheduler.running] == [1], "40 + 1 + 20 + 41 is more than 100"
    driver.step(aborts=[2])
    driver.step(request(3, [3] * 37, new=2))
    assert [s.request.request_id for s in driver.scheduler.running] == [1, 3]


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


def decoding_trio(**changes: int) -> Driver:
    """Three sequences of 8 tokens that decode, in a pool where each has room for 4 more and no page is left."""
    driver = Driver(page_size=4, device_pages=9, **changes)
    driver.step(*(request(i, [i] * 8, new=20) for i in (1, 2, 3)))
    return driver


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
    assert driver.scheduler.retractions >= 1 and driver.cached[3] == 0, "cached tokens are those of the first time"


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
    assert driver.step(retire=1, aborts=[3]).empty, "1 and 2 need a page each, and those of 3 are still in use"
    assert driver.scheduler.retractions == 0
    assert rows(driver.step(retire=1)) == {1: (12, 13)}
    assert rows(driver.step(retire=0)) == {2: (12, 13)}
    assert driver.scheduler.retractions == 0


def test_a_retracted_prefill_tells_each_prompt_logprob_once():
    driver = Driver(page_size=1, device_pages=40, chunk_tokens=2)
    told = []
    driver.step(request(1, [1] * 10, new=30))
    for _ in range(6):
        driver.step()
    plan = driver.step(request(2, range(2, 18), new=3, return_logprob=True, logprob_start=0))
    while driver.scheduler.live:
        for span in plan.spans:
            told += [span.logprob_start + j for j in range(len(span.logprob_targets))]
        plan = driver.step()
    assert driver.scheduler.retractions > 0
    assert told == list(range(1, 16)) and len(driver.tokens[2]) == 3


# ---- ends ----


def test_an_aborted_request_keeps_its_pages_until_its_steps_retire_and_its_token_is_dropped():
    driver = Driver(depth=2, chunk_tokens=8)
    driver.step(request(1, range(16)))
    driver.step(retire=0)
    driver.step(retire=0, aborts=[1, 1])
    assert driver.ends[1].type == "abort" and driver.tokens[1] == []
    driver.step(retire=1)
    assert driver.scheduler.books().protected == 16
    driver.step(retire=1)
    assert driver.scheduler.books().protected == 0 and driver.tokens[1] == []
    driver.run(request(2, range(17)))
    assert driver.cached[2] == 16, "what its steps computed is cached all the same"


def test_an_abort_in_the_entry_of_the_arrival_ends_the_request_before_it_runs():
    driver = Driver()
    assert driver.step(request(1, range(16)), aborts=[1]).empty
    assert driver.ends[1].type == "abort" and not driver.scheduler.live


def test_an_end_in_the_same_entry_beats_a_stop_string_and_an_abort():
    driver = Driver()
    driver.step(request(1, range(4), new=1))
    driver.step(finishes=[Finish(request_id=1, kept_tokens=0, matched="x")], aborts=[1])
    assert driver.ends[1].type == "length" and driver.tokens[1] == [104]


def test_a_stop_string_ends_a_request_that_runs_or_waits():
    driver = decoding_trio()
    while not driver.scheduler.waiting:
        driver.step()
    driver.step(finishes=[Finish(request_id=i, kept_tokens=2, matched="x") for i in (1, 3)])
    assert driver.ends[1] == driver.ends[3] and driver.ends[1].matched == "x"
    driver.run()
    assert len(driver.tokens[2]) == 20


def test_a_stop_id_is_banned_before_min_new_tokens_and_ends_the_request_after():
    driver = Driver()
    driver.token = lambda span: 5 if not span.sample.banned_ids else 6
    driver.run(request(1, range(4), new=9, min_new_tokens=3, stop_token_ids=(5, 8)))
    assert driver.tokens[1] == [6, 6, 6, 5]
    assert (driver.ends[1].type, driver.ends[1].matched) == ("stop", 5)


def test_a_restarted_request_continues_after_what_was_delivered():
    driver = Driver(page_size=1)
    driver.run(request(1, range(6), new=8))
    plan = driver.step(request(2, range(6), new=8, delivered=driver.tokens[1][:5]))
    assert rows(plan) == {2: (10, 11)}
    first = driver.step().emissions[0]
    assert (first.first_position, first.tokens) == (5, (111,))
    assert first.cached_tokens == 6, "delivered tokens are no prompt tokens"
    driver.run()
    assert driver.tokens[2] == driver.tokens[1][5:] and driver.ends[2].type == "length"


def test_a_restarted_request_that_had_everything_ends_at_once():
    driver = Driver()
    assert driver.step(request(1, range(6), new=2, delivered=[1, 2])).empty
    assert driver.ends[1].type == "length" and driver.tokens[1] == []


def test_steps_that_retire_in_one_entry_make_one_emission():
    driver = Driver(depth=2)
    driver.step(request(1, range(4)), request(2, [9] * 4))
    driver.step(retire=1)
    driver.step(retire=0)
    emissions = driver.step(retire=2).emissions
    assert [(e.request_id, e.first_position, len(e.tokens)) for e in emissions] == [(1, 1, 1), (2, 1, 1)]


def test_a_step_with_the_wrong_number_of_tokens_is_a_programmers_error():
    for tokens in ((), (1, 2)):
        driver = Driver()
        driver.step(request(1, range(4)))
        with pytest.raises(AssertionError, match=f"step 1 brought {len(tokens)} tokens, but 1 of its spans sample"):
            driver.scheduler.apply(Entry(step=2, retired=(RetiredStep(step=1, tokens=tokens),)))


# ---- sampling data ----


def test_the_random_number_depends_on_seed_and_position_alone():
    numbers = []
    for others, seed in ((0, 7), (3, 7), (0, 8)):
        driver = Driver(depth=1 + others)
        driver.step(*(request(10 + i, [i] * 5) for i in range(others)), request(1, range(6), seed=seed))
        numbers.append([span.sample.random for span in driver.in_flight[-1].spans if span.request_id == 1])
    assert numbers[0] == numbers[1] != numbers[2]


def test_history_goes_along_only_where_a_penalty_needs_it():
    driver = Driver()
    driver.step(request(1, range(4)), request(2, range(50, 54), presence_penalty=0.5))
    plain, penalised = (span.sample for span in driver.step().spans)
    assert (plain.prompt_ids, plain.output_ids) == ((), ())
    assert (penalised.prompt_ids, penalised.output_ids) == ((50, 51, 52, 53), (104,))


# ---- flush ----


def test_flush_is_refused_while_any_step_is_in_flight():
    """sglang#27446: a launched micro-batch is busy although no request lives."""
    driver = Driver(depth=2)
    driver.step(request(1, range(16)))
    assert driver.step(retire=0, flush=True).control_failures, "a request lives"
    [failure] = driver.step(retire=0, aborts=[1], flush=True).control_failures
    assert failure.message.startswith("not flushed: 0 requests and 1 steps")
    assert driver.scheduler.books().available < driver.scheduler.books().capacity
    [control] = driver.step(flush=True).controls
    books = driver.scheduler.books()
    assert control.action == "flush" and books.available == books.capacity
    driver.run(request(2, range(16)))
    assert driver.cached[2] == 0
