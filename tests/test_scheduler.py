"""The scheduler, one decision at a time: chunks, micro-batches, what the cache gives, ends, sampling data, flush."""

from __future__ import annotations

import pytest

from engine.scheduler.digest import random_bits
from engine.types import Entry, Finish, RetiredStep
from tests.sim.single import Driver, decoding_trio, request, rows

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
    driver = Driver(
        page_size=page_size, chunk_tokens=max(chunk, page_size), device_pages=pages, cache_prefixes=caching
    )
    driver.run(*(request(i, [i % 7, *range(79)], new=1) for i in range(1, 21)))
    assert [len(driver.tokens[i]) for i in range(1, 21)] == [1] * 20
    assert driver.scheduler.cache.device.books().protected == 0


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
    assert rows(driver.step()) == {1: (10, 11), 2: (10, 60)}, "the row that 1 computes now can't be read yet"


def test_the_answer_is_cached_but_for_its_last_token():
    driver = Driver(page_size=1)
    driver.run(request(1, range(5), new=4))
    assert driver.scheduler.cache.device.books().evictable == 5 + 4 - 1
    driver.run(request(2, [*range(5), *driver.tokens[1], 7]))
    assert driver.cached[2] == 5 + 4 - 1


def test_without_a_prefix_cache_nothing_is_kept():
    driver = Driver(cache_prefixes=False)
    driver.run(request(1, range(20)))
    driver.run(request(2, range(20)))
    books = driver.scheduler.cache.device.books()
    assert driver.cached == {1: 0, 2: 0} and books.available == books.capacity


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
    driver.run(request(1, range(30), return_logprob=True, logprob_start=0, top_logprobs=2))
    assert driver.truths[1].positions_told == list(range(1, 30))


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


def test_no_more_is_evicted_than_is_needed():
    driver = Driver(page_size=1, device_pages=30)
    driver.run(request(1, range(20), new=1))
    driver.step(request(2, range(50, 65), new=1))
    assert driver.scheduler.cache.device.pages_evicted == 5


# ---- ends ----


def test_an_aborted_request_keeps_its_pages_until_its_steps_retire_and_its_token_is_dropped():
    driver = Driver(depth=2, chunk_tokens=8)
    driver.step(request(1, range(16)))
    driver.step(retire=0)
    driver.step(retire=0, aborts=[1, 1])
    assert driver.ends[1].type == "abort" and driver.tokens[1] == []
    driver.step(retire=1)
    assert driver.scheduler.cache.device.books().protected == 16
    driver.step(retire=1)
    assert driver.scheduler.cache.device.books().protected == 0 and driver.tokens[1] == []
    driver.run(request(2, range(17)))
    assert driver.cached[2] == 16, "what its steps computed is cached all the same"


def test_an_abort_in_the_entry_of_the_arrival_ends_the_request_before_it_runs():
    driver = Driver()
    assert driver.step(request(1, range(16)), aborts=[1]).empty
    assert driver.ends[1].type == "abort" and not driver.scheduler.live


def test_an_end_in_the_same_entry_beats_a_stop_string_and_an_abort():
    driver = Driver()
    driver.step(request(1, range(4), new=1))
    plan = driver.step(finishes=[Finish(request_id=1, kept_tokens=0, matched="x")], aborts=[1])
    [emission] = plan.emissions
    assert emission.finish.type == "length" and (emission.first_position, emission.tokens) == (0, (104,))


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
        with pytest.raises(
            AssertionError, match=f"step 1 brought {len(tokens)} tokens, but 1 of its spans sample"
        ):
            driver.scheduler.apply(Entry(step=2, retired=(RetiredStep(step=1, tokens=tokens),)))


# ---- sampling data ----


def test_the_random_number_depends_on_seed_and_position_alone():
    numbers = []
    for others, seed in ((0, 7), (3, 7), (0, 8)):
        driver = Driver(depth=1 + others)
        driver.step(*(request(10 + i, [i] * 5) for i in range(others)), request(1, range(6), seed=seed))
        numbers.append([span.sample.random for span in driver.in_flight[-1].spans if span.request_id == 1])
    assert numbers[0] == numbers[1] == [random_bits(7, 6)] != numbers[2]


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
    assert failure.message.startswith("not flushed: 0 requests, 1 steps")
    assert driver.scheduler.cache.device.books().available < driver.scheduler.cache.device.books().capacity
    [control] = driver.step(flush=True).controls
    books = driver.scheduler.cache.device.books()
    assert control.action == "flush" and books.available == books.capacity
    driver.run(request(2, range(16)))
    assert driver.cached[2] == 0
