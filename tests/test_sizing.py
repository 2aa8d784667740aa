"""What a token costs, and how many fit: hand-computed numbers."""

from __future__ import annotations

import itertools
import random
from decimal import Decimal

import pytest

from engine.mem_cache.sizing import (
    ITEM_BYTES,
    NO_CONSTRAINT,
    PoolShape,
    attention_bytes_per_token,
    attention_record_bytes,
    default_running_requests,
    gigabytes,
    host_pages,
    host_tokens,
    indexer_record_bytes,
    latent_record_bytes,
    most_on_a_stage,
    sparse_latent_record_bytes,
    split_budget,
    state_record_bytes,
    tokens_for_budget,
)
from engine.model.spec import ModelSpec


def spec(*, layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        layer_count=layers,
        hidden_size=kv_heads * head_dim * 2,
        query_heads=kv_heads * 2,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward_size=64,
        vocabulary_size=640,
        context_length=2048,
        rope_theta=1e4,
        norm_epsilon=1e-5,
        tied_embeddings=True,
        attention_bias=False,
        output_bias=False,
        qk_norm=False,
        eos_ids=(2,),
    )


def test_the_default_model_costs_46080_bytes_a_token_half_of_it_on_each_of_two_stages():
    smol = spec(layers=30, kv_heads=3, head_dim=64)
    assert attention_bytes_per_token(smol, 30, tp_size=1, dtype="float32") == 46_080
    assert attention_bytes_per_token(smol, 15, tp_size=1, dtype="float32") == 23_040
    assert attention_bytes_per_token(smol, 15, tp_size=1, dtype="bfloat16") == 11_520


def test_layers_are_priced_by_how_many_a_stage_owns():
    """256 bytes a layer and token; three and two layers, or none."""
    dense = spec(layers=5, kv_heads=2, head_dim=16)
    assert [attention_bytes_per_token(dense, n, tp_size=1, dtype="float32") for n in (3, 2, 0)] == [
        768,
        512,
        0,
    ]


def test_heads_are_split_over_tp_ranks_and_copied_when_there_are_more_ranks_than_heads():
    model = spec(layers=1, kv_heads=2, head_dim=16)
    assert [attention_bytes_per_token(model, 1, tp_size=tp, dtype="float32") for tp in (1, 2, 4)] == [
        256,
        128,
        128,
    ]


@pytest.mark.parametrize(
    ("budget", "price", "page", "tokens"),
    [
        (10**9, 768, 1, 1_302_083),
        (10**9, 512, 1, 1_953_125),
        (100 * 10**9, 12_464, 1, 8_023_106),
        (100 * 10**9, 13_120, 1, 7_621_951),
        (100 * 10**9, 13_120, 64, 7_621_888),
        (46_080 * 100, 46_080, 16, 96),
        (46_080 * 16 - 1, 46_080, 16, 0),
    ],
)
def test_a_budget_holds_whole_pages(budget: int, price: int, page: int, tokens: int):
    assert tokens_for_budget(budget, price, page) == tokens


def test_a_rank_that_pays_nothing_sets_no_limit():
    assert tokens_for_budget(10**9, 0, 16) == NO_CONSTRAINT == 2**63 - 1


@pytest.mark.parametrize(
    ("tokens", "requests"), [(1, 1), (511, 1), (1023, 1), (1024, 2), (131_072, 256), (10**9, 256)]
)
def test_running_requests_follow_from_the_agreed_tokens(tokens: int, requests: int):
    assert default_running_requests(tokens) == requests


# ---- records and host pools ---------------------------------------------------------------------


def test_records_cost_what_their_papers_say():
    assert attention_record_bytes(3, 64, 64, tp_size=1, item_bytes=4) == 1_536
    assert attention_record_bytes(8, 128, 64, tp_size=4, item_bytes=2) == 2 * 192 * 2
    assert latent_record_bytes(512, 64, item_bytes=2) == 1_152
    assert sparse_latent_record_bytes(512, 64) == 512 + 512 // 128 * 4 + 64 * 2 == 656
    assert indexer_record_bytes(128) == 132
    assert state_record_bytes(10, 100, convolution_bytes=2, recurrent_bytes=4) == 420


def test_a_pool_costs_nothing_where_a_stage_owns_none_of_its_layers():
    pool = PoolShape("kv", 256, (3, 7, 11))
    assert [pool.bytes_on(range(*ends)) for ends in ((0, 3), (3, 8), (8, 12))] == [0, 512, 256]
    assert most_on_a_stage(pool, [(0, 3), (3, 8), (8, 12)]) == 512


@pytest.mark.parametrize(
    ("gb", "size"),
    [
        (100, 10**11),
        (0.001536, 1_536_000),
        (0.1, 10**8),
        (2.675, 2_675_000_000),
        (Decimal("0.000000001"), 1),
        (1e-10, 0),
    ],
)
def test_gigabytes_are_decimal_and_exact(gb: float, size: int):
    assert gigabytes(gb) == size


@pytest.mark.parametrize(
    ("tokens", "page", "pages"),
    [(7_621_951, 64, 119_093), (8_023_106, 64, 125_362), (2_000, 16, 126), (2_000, 1, 2_001), (0, 16, 1)],
)
def test_a_host_pool_has_one_page_more_than_fit(tokens: int, page: int, pages: int):
    assert host_pages(tokens, page) == pages


def draw_ranges(generator: random.Random, layers: int) -> list[tuple[int, int]]:
    stages = generator.randrange(1, min(layers, 8) + 1)
    cuts = sorted(generator.sample(range(1, layers), stages - 1))
    return list(itertools.pairwise([0, *cuts, layers]))


def draw_pool(generator: random.Random, layers: int) -> PoolShape:
    """A pool of one of the kinds, in all layers or in some."""
    item = ITEM_BYTES[generator.choice(list(ITEM_BYTES))]
    heads, head_dim = 2 ** generator.randrange(6), generator.choice((16, 64, 80, 128))
    record = generator.choice(
        (
            attention_record_bytes(
                heads, head_dim, head_dim, tp_size=generator.choice((1, 2, 4)), item_bytes=item
            ),
            latent_record_bytes(512, 64, item_bytes=item),
            sparse_latent_record_bytes(512, 64),
        )
    )
    owners = range(layers)
    if generator.random() < 0.5:
        owners = sorted(generator.sample(owners, generator.randrange(1, layers + 1)))
    return PoolShape("kv", record, tuple(owners))


def draw_bytes(generator: random.Random) -> int:
    """1 MB to 10 GB, as likely in each decade."""
    return int(10 ** generator.uniform(6, 10))


def test_ten_thousand_starts_end_in_equal_capacities_or_in_a_refusal():
    """sglang#29258: any layers, split, budgets, page size and type; each rank measures another device budget."""
    generator = random.Random(20_260_926)
    started = refused = layerless = 0
    for _ in range(10_000):
        layers, page = generator.randrange(1, 97), generator.randrange(1, 65)
        pool, ranges = draw_pool(generator, layers), draw_ranges(generator, layers)
        prices = [pool.bytes_on(range(*ends)) for ends in ranges]
        device = min(tokens_for_budget(draw_bytes(generator), price, page) for price in prices)
        if device < page:
            refused += 1
            continue
        fixed = draw_bytes(generator) if generator.random() < 0.7 else 0
        ratio = generator.uniform(0.01, 8)
        own = [host_tokens(device, ratio, fixed, price) for price in prices]
        # A ratio follows the agreed device size, so there is nothing left to agree upon.
        assert fixed or len(set(own)) == 1
        tokens = min(own)
        pages = [host_pages(tokens if fixed else count, page) for count in own]
        assert len(set(pages)) == 1 and pages[0] >= 1
        # Rounding before the agreement comes to the same.
        assert pages[0] == min(host_pages(count, page) for count in own)
        if fixed:
            dearest = max(prices)
            assert tokens * dearest <= fixed < (tokens + 1) * dearest
            assert all((pages[0] - 1) * page * price <= fixed for price in prices)
        started += 1
        layerless += 0 in prices
    assert started > 8_000 and refused > 100 and layerless > 1_000


def test_one_budget_for_pages_and_slots_is_never_exceeded():
    """sglang#29034: each of two pools took the whole of it. Here both are cut from it, on every stage."""
    generator = random.Random(1)
    fitted = 0
    for _ in range(2_000):
        layers, page = generator.randrange(2, 65), generator.randrange(1, 65)
        ranges = draw_ranges(generator, layers)
        kinds = [generator.random() < 0.25 for _ in range(layers)]
        kinds[generator.randrange(layers)] = True
        kv = PoolShape("kv", 2_048, tuple(layer for layer in range(layers) if kinds[layer]))
        state = PoolShape("state", 100_000, tuple(layer for layer in range(layers) if not kinds[layer]))
        budget = draw_bytes(generator)
        page_bytes, slot_bytes = most_on_a_stage(kv, ranges) * page, most_on_a_stage(state, ranges)
        try:
            shares = split_budget(budget, page_bytes, slot_bytes, generator.randrange(1, 10_000), 64)
        except ValueError as error:
            assert budget < page_bytes + slot_bytes and str(error).startswith("--hicache-size: ")
            continue
        assert min(shares) >= 1, "a share of nothing is still a fixed size, not a ratio"
        assert sum(shares) <= budget - page_bytes - slot_bytes + 2
        kv_share, state_share = shares
        tokens = min(host_tokens(0, 2.0, kv_share, kv.bytes_on(range(*ends))) for ends in ranges)
        slots = min(host_tokens(0, 2.0, state_share, state.bytes_on(range(*ends))) for ends in ranges)
        for ends in ranges:
            taken = host_pages(tokens, page) * page * kv.bytes_on(range(*ends))
            if state.layers:
                taken += host_pages(slots, 1) * state.bytes_on(range(*ends))
            assert taken <= budget
        fitted += 1
    assert fitted > 1_000
