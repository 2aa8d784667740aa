"""Paged attention: rows of several sequences against keys and values that lie in pages. One signature for CPU and CUDA.

Reads only; the rows' own keys and values have been written before. Query heads that share a key head are folded into
rows of one product, so that no key is ever copied per query head. Shapes are named by B rows, S tokens, kv_heads,
group (query heads per key head) and head_dim; scores are scaled by 1 / sqrt(head_dim).
"""

from __future__ import annotations

import torch

from engine.mem_cache.pool.device import DeviceKVPool
from engine.model.batch import PREFILL_BLOCK_ROWS, Batch, DecodeRows, PrefillSpan


def paged_attention(query: torch.Tensor, pool: DeviceKVPool, layer: int, batch: Batch) -> torch.Tensor:
    """Attention of every row of a batch, [rows, query_heads, head_dim] in and out.

    `layer` counts from the stage's first.
    """
    if len(batch.decodes) == 1 and batch.decodes[0].rows is None:
        return _decode(query, pool, layer, batch.decodes[0])
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for span in batch.prefills:
        _prefill(query[span.rows], pool, layer, span, output[span.rows])
    for decodes in batch.decodes:
        assert decodes.rows is not None, "rows that are not alone in their batch say which they are"
        output.index_copy_(
            0, decodes.rows, _decode(query.index_select(0, decodes.rows), pool, layer, decodes)
        )
    return output


def _prefill(
    query: torch.Tensor, pool: DeviceKVPool, layer: int, span: PrefillSpan, output: torch.Tensor
) -> None:
    """Rows [start, end) of one sequence, each reading up to its own position. Writes `output`, of the query's shape."""
    rows, _, head_dim = query.shape
    kv_heads = pool.record_shape[1]
    keys, values = pool.read(layer, span.pages, query.dtype)[: span.end].permute(1, 2, 0, 3)
    for first in range(0, rows, PREFILL_BLOCK_ROWS):
        block = query[first : first + PREFILL_BLOCK_ROWS]
        count = block.shape[0]
        end = span.start + first + count
        folded = block.view(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(folded, keys[:, :end].transpose(1, 2)).view(kv_heads, -1, count, end)
        scores.mul_(head_dim**-0.5)
        scores[..., end - count :].add_(span.triangle[:count, :count])
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype).view(kv_heads, -1, end)
        attended = torch.bmm(weights, values[:, :end]).view(kv_heads, -1, count, head_dim)
        output[first : first + count] = attended.permute(2, 0, 1, 3).reshape(block.shape)


def _decode(query: torch.Tensor, pool: DeviceKVPool, layer: int, decodes: DecodeRows) -> torch.Tensor:
    """B rows that are the last of their sequences, [B, query_heads, head_dim].

    Pages that all of them begin with are read once, by one product over all rows; the rest is read row by row, and the
    two parts are joined by their shares of the softmax's denominator.
    """
    rows, _, head_dim = query.shape
    kv_heads = pool.record_shape[1]
    folded = query.view(rows, kv_heads, -1, head_dim)
    records = pool.read(layer, decodes.pages, query.dtype)
    keys, values = records.view(rows, -1, *pool.record_shape).permute(2, 0, 3, 1, 4)
    attended, log_sum = _attend(folded, keys, values, decodes.mask)
    if decodes.shared is not None:
        keys, values = pool.read(layer, decodes.shared, query.dtype).permute(1, 2, 0, 3)
        together = folded.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
        shared, shared_log_sum = _attend(together, keys[None], values[None], None)
        shared = shared.view(kv_heads, rows, -1, head_dim).transpose(0, 1)
        shared_log_sum = shared_log_sum.view(kv_heads, rows, -1).transpose(0, 1)
        # e^a / (e^a + e^b) = sigmoid(a - b)
        share = torch.sigmoid(shared_log_sum - log_sum)[..., None].to(query.dtype)
        attended = torch.lerp(attended, shared, share)
    return attended.reshape(query.shape)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, kv_heads, group, head_dim] and the float32 log of its denominator [B, kv_heads, group].

    Keys and values [B, kv_heads, S, head_dim], any strides; mask [B, 1, 1, S] is added to the scores.
    """
    if query.device.type == "cpu":
        attended: tuple[torch.Tensor, torch.Tensor] = (
            # What scaled_dot_product_attention calls on CPUs; only this form gives the denominator away.
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, attn_mask=mask)
        )
        return attended
    return attend_by_products(query, keys, values, mask)


def attend_by_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by plain products, for devices without a kernel that tells its denominator."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    log_sum = scores.logsumexp(-1)
    return torch.matmul((scores - log_sum[..., None]).exp().to(query.dtype), values), log_sum
