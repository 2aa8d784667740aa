"""Bytes per token and tokens per budget: the one place where memory is priced.

Planner, agreement and allocation all call these functions, so price and allocation cannot part. Pure integers.
"""

from __future__ import annotations

from engine.model.spec import ModelSpec

NO_CONSTRAINT = 2**63 - 1
"""What a rank without layers of a kind says when a MIN is taken: any number of tokens is fine."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def attention_bytes_per_token(spec: ModelSpec, layer_count: int, *, tp_size: int, dtype: str) -> int:
    """Bytes that one token's keys and values take in `layer_count` MHA/GQA layers on one tp rank.

    kv_heads_per_tp x (head_dim + v_head_dim) x itemsize x layers; here both head sizes are equal. With more tp
    ranks than KV heads each rank holds one copy of a head.
    """
    kv_heads = max(spec.kv_heads // tp_size, 1)
    return kv_heads * 2 * spec.head_dim * ITEM_BYTES[dtype] * layer_count


def tokens_for_budget(budget_bytes: int, bytes_per_token: int, page_size: int) -> int:
    """Whole pages' worth of tokens that fit into a budget; no constraint when a token costs nothing here."""
    if bytes_per_token == 0:
        return NO_CONSTRAINT
    return budget_bytes // bytes_per_token // page_size * page_size


def default_running_requests(device_tokens: int) -> int:
    """How many sequences may run at once when the operator does not say; from the agreed capacity only."""
    return min(max(device_tokens // 512, 1), 256)
