"""What a token costs, and how many fit: hand-computed numbers."""

from __future__ import annotations

import pytest

from engine.mem_cache.sizing import (
    NO_CONSTRAINT,
    attention_bytes_per_token,
    default_running_requests,
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
