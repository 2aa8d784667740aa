"""Paged attention: rows of several sequences against keys and values that lie in pages. One signature for CPU and CUDA.

Reads only; the rows' own keys and values have been written before. Query heads that share a key head are folded into
rows of one product, so that no key is ever copied per query head.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.mem_cache.pool.device import DeviceKVPool
from engine.model.batch import Batch, DecodeRows, PrefillSpan


def paged_attention(query: torch.Tensor, pool: DeviceKVPool, layer: int, batch: Batch) -> torch.Tensor:
    """Attention of every row of a batch, [rows, query_heads, head_dim] in and out; scale 1 / sqrt(head_dim).

    `layer` counts from the stage's first.
    """
    decodes = batch.decodes
    if decodes is not None and decodes.rows is None:
        return _decode(query, pool, layer, decodes)
    output = torch.empty_like(query)
    for span in batch.prefills:
        output[span.rows] = _prefill(query[span.rows], pool, layer, span)
    if decodes is not None:
        output.index_copy_(
            0, decodes.rows, _decode(query.index_select(0, decodes.rows), pool, layer, decodes)
        )
    return output


def _prefill(query: torch.Tensor, pool: DeviceKVPool, layer: int, span: PrefillSpan) -> torch.Tensor:
    """One span's rows, each reading up to its own position."""
    keys, values = pool.read(layer, span.pages)[: span.end].permute(1, 2, 0, 3)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=span.mask,
        is_causal=span.mask is None,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _decode(query: torch.Tensor, pool: DeviceKVPool, layer: int, decodes: DecodeRows) -> torch.Tensor:
    """Rows of one token each, [B, query_heads, head_dim]."""
    _, kv_heads, head_dim = pool.record_shape
    folded = query.reshape(decodes.count, kv_heads, -1, head_dim)
    own = pool.read(layer, decodes.pages).view(decodes.count, -1, *pool.record_shape).permute(2, 0, 3, 1, 4)
    if decodes.shared is None:
        attended = scaled_dot_product_attention(folded, own[0], own[1], attn_mask=decodes.mask)
    else:
        shared = pool.read(layer, decodes.shared).permute(1, 2, 0, 3)
        attended = _decode_shared(folded, shared, own, decodes.mask)
    return attended.reshape(query.shape)


def _decode_shared(
    query: torch.Tensor, shared: torch.Tensor, own: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One softmax over positions that all rows share and positions of their own.

    query [B, kv_heads, group, head_dim]; shared [2, kv_heads, S, head_dim]; own [2, B, kv_heads, T, head_dim]. The shared
    keys are read once, by one product over all rows.
    """
    rows, kv_heads, group, head_dim = query.shape
    together = query.transpose(0, 1).reshape(kv_heads, rows * group, head_dim)
    scale = head_dim**-0.5
    shared_scores = (
        torch.bmm(together, shared[0].transpose(1, 2)).view(kv_heads, rows, group, -1).transpose(0, 1)
    )
    own_scores = torch.matmul(query, own[0].transpose(-1, -2))
    if mask is not None:
        own_scores += mask
    length = shared.shape[2]
    weights = (
        torch.cat((shared_scores, own_scores), -1)
        .mul_(scale)
        .softmax(-1, dtype=torch.float32)
        .to(query.dtype)
    )
    from_shared = weights[..., :length].transpose(0, 1).reshape(kv_heads, rows * group, length)
    attended = torch.bmm(from_shared, shared[1]).view(kv_heads, rows, group, head_dim).transpose(0, 1)
    return attended + torch.matmul(weights[..., length:], own[1])
