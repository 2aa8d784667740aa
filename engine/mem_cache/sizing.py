"""Bytes per token and tokens per budget: the one place where memory is priced.

Planner, agreement and allocation all call these functions, so price and allocation cannot part. Pure integers.

A model keeps its cache in a few pools, each a record per token (or per slot, for recurrent state) in some of its
layers. `PoolShape` lists one for the whole model, so a stage that owns none of its layers still knows the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from engine.model.spec import ModelSpec

NO_CONSTRAINT = 2**63 - 1
"""What a rank without layers of a kind says when a MIN is taken: any number of tokens is fine."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one number, by the name of its type."""

SCALE_GROUP = 128
"""Numbers that share one fp32 scale in the fp8 layouts of sparse-indexed latent attention."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """One pool of the whole model. Every rank lists all pools of the model, in the same order."""

    name: str
    """`kv` (keys and values), `latent` (MLA), `indexer` (DSA's sidecar) or `state` (recurrent layers)."""
    record_bytes: int
    """What one token, or one slot of `state`, takes in one layer on one tp rank."""
    layers: tuple[int, ...]
    """The model's layers that keep a record."""

    def bytes_on(self, layers: range) -> int:
        """Bytes per token (or slot) on a stage that owns `layers`; 0 where it owns none of this kind."""
        return self.record_bytes * sum(layer in layers for layer in self.layers)


# ---- records: bytes of one token in one layer on one tp rank ---------------------------------------


def attention_record_bytes(
    kv_heads: int, head_dim: int, value_head_dim: int, *, tp_size: int, item_bytes: int
) -> int:
    """MHA and GQA: kv_heads_per_tp x (head_dim + v_head_dim) x itemsize.

    With more tp ranks than KV heads each rank holds one copy of a head.
    """
    return max(kv_heads // tp_size, 1) * (head_dim + value_head_dim) * item_bytes


def latent_record_bytes(latent_rank: int, rope_head_dim: int, *, item_bytes: int) -> int:
    """MLA: (kv_lora_rank + qk_rope_head_dim) x itemsize, the same on every tp rank (576 numbers in DeepSeek-V3)."""
    return (latent_rank + rope_head_dim) * item_bytes


def sparse_latent_record_bytes(latent_rank: int, rope_head_dim: int) -> int:
    """DSA's fp8 layout: latent in fp8, a fp32 scale per 128 numbers, rotary part in bf16 (512 + 16 + 128 = 656)."""
    return latent_rank + latent_rank // SCALE_GROUP * ITEM_BYTES["float32"] + rope_head_dim * 2


def indexer_record_bytes(head_dim: int, *, item_bytes: int = 1) -> int:
    """DSA's indexer: one key, in fp8 with its scales (128 + 4 = 132), or in plain numbers of more bytes."""
    scales = head_dim // SCALE_GROUP if item_bytes == 1 else 0
    return head_dim * item_bytes + scales * ITEM_BYTES["float32"]


def state_record_bytes(
    convolution_numbers: int, recurrent_numbers: int, *, convolution_bytes: int, recurrent_bytes: int
) -> int:
    """Linear attention and Mamba: one sequence's convolution window and recurrent state in one layer."""
    return convolution_numbers * convolution_bytes + recurrent_numbers * recurrent_bytes


def attention_bytes_per_token(spec: ModelSpec, layer_count: int, *, tp_size: int, dtype: str) -> int:
    """Bytes that one token's keys and values take in `layer_count` MHA/GQA layers on one tp rank."""
    head_dim, item_bytes = spec.head_dim, ITEM_BYTES[dtype]
    return layer_count * attention_record_bytes(
        spec.kv_heads, head_dim, head_dim, tp_size=tp_size, item_bytes=item_bytes
    )


# ---- counts ----------------------------------------------------------------------------------------


def tokens_for_budget(budget_bytes: int, bytes_per_token: int, page_size: int) -> int:
    """Whole pages' worth of tokens that fit into a budget; no constraint when a token costs nothing here."""
    if bytes_per_token == 0:
        return NO_CONSTRAINT
    return budget_bytes // bytes_per_token // page_size * page_size


def default_running_requests(device_tokens: int) -> int:
    """How many sequences may run at once when the operator does not say; from the agreed capacity only."""
    return min(max(device_tokens // 512, 1), 256)


def gigabytes(size_gb: float | Decimal) -> int:
    """Decimal GB, as an operator writes them, in bytes. Exact: 0.001536 GB are 1,536,000 bytes."""
    return int(Decimal(str(size_gb)) * 10**9)


def host_tokens(device_tokens: int, ratio: float, budget_bytes: int, bytes_per_token: int) -> int:
    """Tokens (or slots) of a host pool before agreement: what a fixed budget holds, or a multiple of the device's.

    The budget counts when it is positive; a stage on which a token costs nothing sets no limit to it.
    """
    if budget_bytes <= 0:
        return int(device_tokens * ratio)
    return budget_bytes // bytes_per_token if bytes_per_token else NO_CONSTRAINT


def host_pages(tokens: int, page_size: int) -> int:
    """Pages of a host pool for an agreed number of tokens: one more than fit whole, even on exact multiples.

    The rule of the engine that reported the fault, kept so that numbers are equal: 7,621,951 tokens in pages of 64
    become 119,093 pages, 7,621,952 tokens.
    """
    return tokens // page_size + 1


def split_budget(
    budget_bytes: int, whole_page_bytes: int, whole_slot_bytes: int, device_pages: int, device_slots: int
) -> tuple[int, int]:
    """Cut one fixed budget into bytes for paged pools and bytes for state slots, equally on every rank.

    `whole_*` are the bytes of one page and one slot on the stage that pays most for them. One of each is taken off
    first, since `host_pages` adds one, and the rest is shared as the device shares its memory. Raises ValueError when
    not even these fit. A share is spent by each stage at its own price, so no stage exceeds the budget.
    """
    rest = budget_bytes - whole_page_bytes - whole_slot_bytes
    paged, state = device_pages * whole_page_bytes, device_slots * whole_slot_bytes
    if rest < 0 or paged + state == 0:
        raise ValueError(
            f"--hicache-size: {budget_bytes} bytes hold no page of {whole_page_bytes} bytes "
            f"and slot of {whole_slot_bytes} bytes"
        )
    share = rest * paged // (paged + state)
    # Even a share of nothing is a fixed size: at 0 a stage would go by ratio and miss the MIN of the others. A byte
    # buys nothing, so it does no harm.
    return max(share, 1), max(rest - share, 1)


def most_on_a_stage(pool: PoolShape, layer_ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes per token (or slot) on the stage that pays most: the same number on every rank, without a collective."""
    return max(pool.bytes_on(range(*layers)) for layers in layer_ranges)
