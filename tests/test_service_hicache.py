"""A host tier in real services: right answers wherever a prefix is, at each write policy and number of stages.

Every test is one service, whose stages are uneven, and asks it all that its layout is good for: starts are what these
tests take their time for. Cases of public faults name their threads.
"""

import random
import time

import pytest

from tests.host_tier import POLICIES, ask_all, check_legs, check_right, from_host, tier

pytestmark = pytest.mark.process


@pytest.mark.parametrize("policy", POLICIES)
def test_one_stage(dense, policy):
    # sglang#33713: a tier that is written and never read. sglang#29258: one stage agrees with nobody; 0.003 GB at
    # 1,280 bytes a token are 2,343 tokens, 147 pages.
    with tier(dense, 1, 512, hicache_size=0.003, hicache_write_policy=policy) as service:
        assert service.stats()["host"]["capacity"] == 2352
        assert "another stage" not in service.stderr
        check_legs(service, dense, 512)
        shared = random.Random(1).choices(range(640), k=200)
        prompts = dense.clear_prompts([60] * 8, 8, seed=1, prefix=shared)
        # Each twice in a row: what write_through_selective has seen once it does not keep.
        twice = [prompt for prompt in prompts for _ in range(2)]
        for _ in range(2):
            answers = ask_all(service, twice, 8, 1)
            check_right(answers, dense.ids(twice, 8))
            assert all(answer["meta_info"]["cached_tokens"] >= 192 for answer in answers[1:])
        assert all(answer["meta_info"]["cached_tokens"] == 256 for answer in answers)
        assert sum(map(from_host, answers)) > 0


def test_two_stages_write_through(dense):
    # TRT-LLM#8813: answers contain text of other users' prompts; two offloads into one page, loads before their
    # offload had ended.
    prompts = dense.clear_prompts([200] * 20, 16, seed=2)
    right, order = dense.ids(prompts, 16), random.Random(2)
    with tier(dense, 2, 512, hicache_ratio=16, max_running_requests=4) as service:
        check_legs(service, dense, 512)
        served = 0
        for _ in range(10):
            chosen = order.sample(range(20), 20)
            answers = ask_all(service, [prompts[number] for number in chosen], 16, 4)
            check_right(answers, [right[number] for number in chosen])
            served += sum(from_host(answer) >= 192 - 16 for answer in answers)
        assert served >= 100


def test_two_stages_write_through_selective(dense):
    # sglang#29258: 1 GB is 1,302,083 tokens of 768 bytes and 1,953,125 of 512. sglang#27285: stages that finish their
    # copies at different times disagree.
    flags = {"hicache_size": 1, "hicache_ratio": 3, "hicache_write_policy": "write_through_selective"}
    slow = {"copy": {"rank": 0, "seconds": 0.003}}
    with tier(dense, 2, 1024, **flags, max_running_requests=16, faults=slow) as service:
        assert service.stats()["host"]["capacity"] == (1302083 // 16 + 1) * 16
        assert (
            "[PP1 TP0] host pool: room for 1953125 here, but only 1302083 on another stage" in service.stderr
        )
        assert "--hicache-size 1 wins; --hicache-ratio 3 is not used" in service.stderr
        check_legs(service, dense, 1024)
        check_mixed_traffic(service, dense)


@pytest.mark.parametrize(("policy", "slow_rank"), [("write_back", 1), ("write_through", 0)])
def test_two_stages_with_full_tiers(dense, policy, slow_rank):
    # sglang#31427, sglang#26728, sglang#32331: both tiers always full, and a page is used again while its load runs.
    slow = {"copy": {"rank": slow_rank, "seconds": 0.004}}
    flags = {"hicache_ratio": 2, "hicache_write_policy": policy, "max_running_requests": 3}
    with tier(dense, 2, 256, **flags, faults=slow) as service:
        check_legs(service, dense, 256, length=112)
        check_full_tiers(service, dense)


def test_three_stages_write_through_selective(dense):
    # sglang#27285 with pages of one token.
    flags = {"page_size": 1, "hicache_write_policy": "write_through_selective"}
    slow = {"copy": {"rank": 1, "seconds": 0.0001}}
    with tier(dense, 3, 1024, **flags, max_running_requests=16, faults=slow) as service:
        check_legs(service, dense, 1024)
        check_mixed_traffic(service, dense)


def test_three_stages_write_back(dense):
    # sglang#27446: flushed while steps, or copies, were under way.
    flags = {"chunked_prefill_size": 64, "hicache_write_policy": "write_back", "max_running_requests": 4}
    slow = {"copy": {"rank": 2, "seconds": 0.004}}
    with tier(dense, 3, 2048, **flags, faults=slow) as service:
        check_legs(service, dense, 2048)
        check_flushes(service, dense)


def test_three_stages_write_through(dense):
    # LMCache#4185, LMCache#3688, vllm#46283: a client leaves while its load is under way.
    slow = {"copy": {"rank": -1, "seconds": 0.008}}
    with tier(dense, 3, 512, hicache_ratio=4, max_running_requests=4, faults=slow) as service:
        check_legs(service, dense, 512)
        check_leaving(service, dense)


# ---- traffic ----


def check_mixed_traffic(service, model):
    """150 prompts of 10 to 300 tokens, each some times, of which every third begins with the same 100 tokens."""
    order = random.Random(3)
    shared = order.choices(range(640), k=100)
    prompts = model.clear_prompts([order.randrange(10, 301) for _ in range(24)], 20, seed=3)
    prompts += model.clear_prompts([order.randrange(1, 201) for _ in range(12)], 20, seed=4, prefix=shared)
    prompts = order.choices(prompts, k=150)
    counts = [order.randrange(1, 21) for _ in prompts]
    before = service.stats()["counters"]["loaded_pages"]
    check_right(ask_all(service, prompts, counts, 64), model.ids(prompts, 20))
    assert service.check_idle(20.0)["counters"]["loaded_pages"] > before


def check_full_tiers(service, model):
    """Eight prompts of 112 tokens, three at a time, where few fit into both tiers. A rotation would hit nothing."""
    prompts = model.clear_prompts([112] * 8, 8, seed=5)
    prompts = random.Random(5).choices(prompts, weights=range(1, 9), k=100)
    answers = ask_all(service, prompts, 8, 3)
    check_right(answers, model.ids(prompts, 8))
    stats = service.check_idle(20.0)
    assert stats["counters"]["loaded_pages"] > 0 and stats["counters"]["host_evicted_pages"] > 0
    assert stats["host"]["available"] <= 128 and sum(map(from_host, answers)) > 0


def check_flushes(service, model):
    """Flushing every few milliseconds beside four long prompts harms nobody; when idle it forgets all."""
    prompts = model.clear_prompts([600] * 4, 20, seed=6)
    with service.flushing():
        for _ in range(2):
            check_right(ask_all(service, prompts, 20, 4), model.ids(prompts, 20))
    check_right(ask_all(service, prompts, 20, 4), model.ids(prompts, 20))
    check_forgotten(service, prompts[0])


def check_forgotten(service, prompt):
    """Two flushes of an idle service leave both tiers empty."""
    assert [service.post("/flush_cache").status_code for _ in range(2)] == [200, 200]
    stats = service.check_idle()
    assert all(stats[name]["available"] == stats[name]["capacity"] for name in ("device", "host"))
    assert service.generate(prompt, 1)["meta_info"]["cached_tokens"] == 0


def check_leaving(service, model):
    """Thirty clients ask for what only the host has, and leave at some moment of its load; later all is there."""
    order = random.Random(7)
    prompts = model.clear_prompts([160] * 6, 8, seed=7)
    right, under_way = model.ids(prompts, 8), 0
    check_right(ask_all(service, prompts, 8, 1), right)
    for number in range(30):
        stream = service.stream(prompts[number % 6], 8)
        time.sleep(order.random() * 0.1)
        stream.close()
        under_way += service.stats()["counters"]["copies_under_way"] > 0
        stream.wait_end()
    assert under_way > 5
    service.check_idle(20.0)
    answers = ask_all(service, prompts, 8, 2)
    check_right(answers, right)
    assert all(answer["meta_info"]["cached_tokens"] == 144 for answer in answers)
    assert sum(map(from_host, answers)) > 0
    service.gen(prompts[0][1:], 1)
    # Copies that nobody waits for are under way: a flush takes effect when they have ended.
    assert service.stats()["counters"]["copies_under_way"] > 0
    check_forgotten(service, prompts[0])
