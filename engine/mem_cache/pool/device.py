"""The bytes of the device tier (L1): one tensor per stage, a record per token and layer.

Owns the memory and its layout. Which page belongs to whom is none of its business: the books (allocator, radix
tree) say that, and every index given here is taken as right. Nothing is allocated but records: no padding page, no
table, so that the bytes equal what `sizing.attention_bytes_per_token` priced.

    records [layer][token slot = page * page_size + offset][record]       record of MHA/GQA: keys, then values
                                                                          [2, kv_heads, head_dim]

Pages are not erased when they change hands. Attention reads whole pages, and what it masks counts as nothing only if
it is finite, so a sequence that begins a page clears the slots of it that it does not fill at once (`clear`): numbers
that are not finite, which a broken model may make, reach no other sequence by way of its page.

A token's keys and values lie side by side, so that writing is one scatter per layer, a page is one run of memory
(one copy when pages are gathered or moved to another tier), and a run of neighbouring pages is read without any copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class DeviceKVPool:
    """Keys and values of `pages * page_size` tokens in `layer_count` layers."""

    def __init__(
        self,
        layer_count: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate. Counts are agreed ones; `kv_heads` are those of this rank."""
        self.layer_count, self.pages, self.page_size = layer_count, pages, page_size
        self.record_shape = (2, kv_heads, head_dim)
        # On the CPU untouched memory costs neither time nor room: a large tensor comes straight from the system.
        self.records = torch.empty(
            (layer_count, pages * page_size, *self.record_shape), dtype=dtype, device=device
        )

    @property
    def byte_count(self) -> int:
        """Bytes allocated: layers x tokens x record."""
        return self.records.numel() * self.records.element_size()

    def write(self, layer: int, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store one record per row, [rows, 2 * kv_heads, head_dim], at `slots` [rows] of the stage's `layer`.

        Rounded to the pool's type, where that is another.
        """
        stored = self.records[layer].view(-1, *records.shape[1:])
        stored.index_copy_(0, slots, records.to(stored.dtype))

    def clear(self, slots: torch.Tensor) -> None:
        """Zero the records of `slots` in all layers."""
        self.records.index_fill_(1, slots, 0)

    def read(self, layer: int, pages: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Records of whole pages in order, [tokens, 2, kv_heads, head_dim], as numbers of `dtype`.

        A view for a run of pages in a pool of that type, else a copy.
        """
        paged = self.paged[layer]
        found = paged[pages] if isinstance(pages, slice) else paged.index_select(0, pages)
        return found.view(-1, *self.record_shape).to(dtype)

    @property
    def paged(self) -> torch.Tensor:
        """All records as pages, [layers, pages, numbers in a page]: the form in which tiers copy them."""
        return self.records.view(self.layer_count, self.pages, self.page_size * math.prod(self.record_shape))


def page_run(pages: Sequence[int]) -> slice | None:
    """The pages as one run of neighbours, or None when they are not that."""
    start, count = pages[0], len(pages)
    # Ends first: it settles nearly every table that is not a run.
    if pages[-1] - start != count - 1 or list(pages) != list(range(start, start + count)):
        return None
    return slice(start, start + count)
