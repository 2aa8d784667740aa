"""The bytes of the device tier (L1): a record per token and layer, or per slot and layer for recurrent state.

A pool is a record shape and a place. It is sized first, which takes no memory, and allocated once all ranks have agreed
on the sizes. It owns the memory and its layout. Which page belongs to whom is none of its business: the books
(allocator, radix tree) say that, and every index given here is taken as right. Nothing is allocated but records: no
padding page, no table, so that the bytes equal what `sizing` priced.

    records [layer][token slot = page * page_size + offset][record]       MHA/GQA: keys, then values
                                                                          [2, kv_heads, head_dim]; MLA: [latent]

Pages are not erased when they change hands. Attention reads whole pages, and what it masks counts as nothing only if
it is finite, so a sequence that begins a page clears the slots of it that it does not fill at once (`clear`): numbers
that are not finite, which a broken model may make, reach no other sequence by way of its page.

A token's record lies in one piece, so that writing is one scatter per layer, a page of a layer is one run of memory
(one copy when pages are gathered or moved to another tier), and a run of neighbouring pages is read without any copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch


class DeviceKVPool:
    """One record for each of `pages * page_size` tokens in each of `layer_count` layers, which may be none.

    `record_shape` is (2, kv_heads, head_dim) for MHA and GQA, with the KV heads of this rank, and (latent,) for MLA.
    """

    def __init__(
        self,
        layer_count: int,
        pages: int,
        page_size: int,
        record_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Count only; `allocate` takes the memory."""
        self.layer_count, self.pages, self.page_size = layer_count, pages, page_size
        self.record_shape, self.dtype, self.device = record_shape, dtype, device
        self._records: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Tokens."""
        return self.pages * self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token on this rank: layers x numbers in a record x itemsize."""
        return self.layer_count * math.prod(self.record_shape) * self.dtype.itemsize

    @property
    def byte_count(self) -> int:
        """Bytes of all records, allocated or not."""
        return self.size * self.bytes_per_token

    def allocate(self) -> Self:
        """Take the memory, once. Raises RuntimeError when the device does not have it."""
        assert self._records is None, "the device pool has its memory already"
        # On the CPU untouched memory costs neither time nor room: a large tensor comes straight from the system.
        self._records = torch.empty(
            (self.layer_count, self.size, *self.record_shape), dtype=self.dtype, device=self.device
        )
        return self

    @property
    def records(self) -> torch.Tensor:
        """All records, [layers, tokens, *record]."""
        assert self._records is not None, "the device pool has no memory yet"
        return self._records

    def write(self, layer: int, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store one record per row at `slots` [rows] of the stage's `layer`.

        `records` has the record's numbers in any shape, [rows, 2 * kv_heads, head_dim] for instance. They are rounded
        to the pool's type, where that is another.
        """
        stored = self.records[layer].view(-1, *records.shape[1:])
        stored.index_copy_(0, slots, records.to(stored.dtype))

    def clear(self, slots: torch.Tensor) -> None:
        """Zero the records of `slots` in all layers."""
        self.records.index_fill_(1, slots, 0)

    def read(self, layer: int, pages: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Records of whole pages in order, [tokens, *record], as numbers of `dtype`.

        A view for a run of pages in a pool of that type, else a copy.
        """
        paged = self.paged[layer]
        found = paged[pages] if isinstance(pages, slice) else paged.index_select(0, pages)
        return found.view(-1, *self.record_shape).to(dtype)

    @property
    def paged(self) -> torch.Tensor:
        """All records as pages, [layers, pages, numbers in a page]: the form in which tiers copy them."""
        return self.records.view(self.layer_count, self.pages, self.page_size * math.prod(self.record_shape))


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of a recurrent layer's state: its shape for one sequence and the type of its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def byte_count(self) -> int:
        """Bytes in one layer."""
        return math.prod(self.shape) * self.dtype.itemsize


class DeviceStatePool:
    """The recurrent state of `slots` sequences in each of `layer_count` layers, which may be none.

    Linear attention and Mamba keep two parts: a window of the convolution's inputs, and the recurrent state.
    """

    def __init__(
        self,
        layer_count: int,
        slots: int,
        convolution: StatePart,
        recurrent: StatePart,
        device: torch.device,
    ) -> None:
        """Count only; `allocate` takes the memory."""
        self.layer_count, self.size, self.device = layer_count, slots, device
        self.parts = (convolution, recurrent)
        self._states: tuple[torch.Tensor, ...] | None = None

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state on this rank."""
        return self.layer_count * sum(part.byte_count for part in self.parts)

    def allocate(self) -> Self:
        """Take the memory, once. Raises RuntimeError when the device does not have it."""
        assert self._states is None, "the state pool has its memory already"
        self._states = tuple(
            torch.empty((self.layer_count, self.size, *part.shape), dtype=part.dtype, device=self.device)
            for part in self.parts
        )
        return self

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """Convolution windows and recurrent states, each [layers, slots, *shape]."""
        assert self._states is not None, "the state pool has no memory yet"
        return self._states


def page_run(pages: Sequence[int]) -> slice | None:
    """The pages as one run of neighbours, or None when they are not that."""
    start, count = pages[0], len(pages)
    # Ends first: it settles nearly every table that is not a run.
    if pages[-1] - start != count - 1 or list(pages) != list(range(start, start + count)):
        return None
    return slice(start, start + count)
