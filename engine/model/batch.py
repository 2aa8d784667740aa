"""One step's rows as tensors: ids, positions, where keys and values go, and where attention reads.

Built once per step from a plan's spans, complete when built, used by every layer and never changed. Rows stand in the
plan's order on every stage, since hidden states travel by row number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.mem_cache.pool.device import page_run
from engine.types import Sample, Span

Pages = slice | torch.Tensor
"""A page table as the pool reads it: a run of neighbours, or page numbers [pages]."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSpan:
    """A span of several rows. Row r reads positions up to its own."""

    rows: slice
    start: int
    """Position of the first row: tokens before it are in the pool already."""
    end: int
    pages: Pages
    """Pages of all positions below `end`."""
    triangle: torch.Tensor
    """[n, n]: 0 on and below the diagonal, -inf above; at least as large as a block of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Spans of one row each, which read together: first the pages they all begin with, then their own."""

    rows: torch.Tensor | None
    """Row numbers [B] in the batch; None when they are all rows of the batch, in order."""
    shared: Pages | None
    """Pages that all these rows begin with, all of them full; None when there are too few to pay."""
    pages: Pages
    """The rest, row by row, each row's table filled up with its own last page to the longest: [B * pages]."""
    mask: torch.Tensor | None
    """[B, 1, 1, tokens], over the rest only: -inf beyond a row's end; None when there is nothing to hide."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Neighbouring rows of one span whose log probabilities of given prompt tokens are wanted."""

    request_id: int
    first_row: int
    targets: tuple[int, ...]
    """Prompt ids; target j is scored by row first_row + j."""
    first_position: int
    """Position in the prompt of the first target."""
    top: int
    """How many alternatives go with each."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step computes."""

    token_ids: torch.Tensor
    """[rows]"""
    positions: torch.Tensor
    """[rows]"""
    slots: torch.Tensor
    """[rows]: the token slot of the pool that takes the row's keys and values."""
    begun_slots: torch.Tensor | None
    """The rest of pages that these rows begin and do not fill, which must be cleared before anybody reads; or None."""
    prefills: tuple[PrefillSpan, ...]
    decodes: tuple[DecodeRows, ...]
    sample_rows: torch.Tensor
    """Last rows of the spans that sample, in plan order."""
    samples: tuple[tuple[int, Sample], ...]
    """(request id, how its token is chosen), one per sample row."""
    scored: tuple[ScoredRows, ...]

    @property
    def row_count(self) -> int:
        """Rows of hidden states that travel between stages."""
        return self.token_ids.shape[0]

    @staticmethod
    def build(spans: Sequence[Span], page_size: int, device: torch.device, dtype: torch.dtype) -> Batch:
        """Make the tensors of a step. `dtype` is that of the hidden states: masks have it too."""
        build = _Builder(page_size, device, dtype)
        first_rows = list(accumulate((span.count for span in spans), initial=0))
        placed = list(zip(spans, first_rows, strict=False))
        positions = [position for span in spans for position in range(span.start, span.end)]
        slots = [
            span.pages[position // page_size] * page_size + position % page_size
            for span in spans
            for position in range(span.start, span.end)
        ]
        begun = [slot for span in spans for slot in _begun_slots(span, page_size)]
        sampling = [(span, first_row) for span, first_row in placed if span.sample is not None]
        return Batch(
            token_ids=build.integers([token_id for span in spans for token_id in span.token_ids]),
            positions=build.integers(positions),
            slots=build.integers(slots),
            begun_slots=build.integers(begun) if begun else None,
            prefills=build.prefills([(span, row) for span, row in placed if span.count > 1]),
            decodes=build.decodes([(span, row) for span, row in placed if span.count == 1], len(positions)),
            sample_rows=build.integers([first_row + span.count - 1 for span, first_row in sampling]),
            samples=tuple((span.request_id, span.sample) for span, _ in sampling if span.sample is not None),
            scored=tuple(_scored(span, first_row) for span, first_row in placed if span.logprob_targets),
        )


def _begun_slots(span: Span, page_size: int) -> range:
    """Slots behind the span's end in its last page, if the span is the first to write there; empty otherwise."""
    filled = span.end % page_size
    if filled == 0 or filled > span.count:
        return range(0)
    page = span.pages[span.end // page_size]
    return range(page * page_size + filled, (page + 1) * page_size)


def _scored(span: Span, first_row: int) -> ScoredRows:
    offset = span.logprob_start - 1 - span.start  # the row before a token gives its probability
    assert 0 <= offset <= span.count - len(span.logprob_targets), (
        f"{len(span.logprob_targets)} targets from position {span.logprob_start} in rows [{span.start}, {span.end})"
    )
    return ScoredRows(
        span.request_id, first_row + offset, span.logprob_targets, span.logprob_start, span.top_logprobs
    )


PREFILL_BLOCK_ROWS = 128
"""Rows of a prefill span that read together: a block's scores stay in cache, and keys after a block are not read."""
_SAVED_TOKENS_MIN = 512
"""Reading a common prefix once must spare this many tokens, since joining the two parts has a price of its own."""
_GROUP_TOKENS_MAX = 4096
"""Most tokens, filling included, that rows read in one go: their copy stays near the caches' size, and short
sequences are not filled up to the length of a very long one."""


class _Builder:
    """Makes tensors of one step; holds what all of them need."""

    def __init__(self, page_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.page_size, self.device, self.dtype = page_size, device, dtype

    def integers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def pages(self, pages: Sequence[int]) -> Pages:
        run = page_run(pages)
        return self.integers(pages) if run is None else run

    def prefills(self, placed: Sequence[tuple[Span, int]]) -> tuple[PrefillSpan, ...]:
        if not placed:
            return ()
        size = min(max(span.count for span, _ in placed), PREFILL_BLOCK_ROWS)
        triangle = torch.full((size, size), -torch.inf, dtype=self.dtype, device=self.device).triu_(1)
        return tuple(
            PrefillSpan(
                rows=slice(first_row, first_row + span.count),
                start=span.start,
                end=span.end,
                pages=self.pages(self._table(span)),
                triangle=triangle,
            )
            for span, first_row in placed
        )

    def decodes(self, placed: Sequence[tuple[Span, int]], row_count: int) -> tuple[DecodeRows, ...]:
        """Rows grouped by the prefix they have in common, then cut where a group would read too much in one go."""
        by_first_page: dict[int, list[tuple[Span, int]]] = {}
        for span, row in placed:
            by_first_page.setdefault(span.pages[0], []).append((span, row))
        groups, alone = [], []
        for members in by_first_page.values():
            shared = _common_pages([self._table(span) for span, _ in members])
            if shared * self.page_size * (len(members) - 1) >= _SAVED_TOKENS_MIN:
                groups.append((members, shared))
            else:
                alone += members
        if alone:
            groups.append((sorted(alone, key=lambda member: member[1]), 0))
        return tuple(
            self._decode_rows(part, shared, row_count)
            for members, shared in groups
            for part in self._parts(members, shared)
        )

    def _parts(self, members: list[tuple[Span, int]], shared: int) -> Iterator[list[tuple[Span, int]]]:
        """Cut a group so that each part reads a bounded number of tokens beyond the shared ones."""
        skipped = shared * self.page_size
        if max(span.end for span, _ in members) - skipped <= _GROUP_TOKENS_MAX // len(members):
            yield members
            return
        part: list[tuple[Span, int]] = []
        for member in sorted(members, key=lambda member: member[0].end):
            if part and (len(part) + 1) * (member[0].end - skipped) > _GROUP_TOKENS_MAX:
                yield part
                part = []
            part.append(member)
        yield part

    def _decode_rows(self, members: list[tuple[Span, int]], shared: int, row_count: int) -> DecodeRows:
        tables = [self._table(span) for span, _ in members]
        longest = max(map(len, tables))
        filled = [
            page for table in tables for page in (*table[shared:], *(table[-1],) * (longest - len(table)))
        ]
        return DecodeRows(
            rows=None if len(members) == row_count else self.integers([row for _, row in members]),
            shared=self.pages(tables[0][:shared]) if shared else None,
            pages=self.pages(filled),
            mask=self._beyond([span.end - shared * self.page_size for span, _ in members], longest - shared),
        )

    def _beyond(self, lengths: list[int], pages: int) -> torch.Tensor | None:
        """Additive mask [B, 1, 1, tokens] that hides what lies beyond each row's length; None if nothing does."""
        tokens = pages * self.page_size
        if min(lengths) == tokens:
            return None
        beyond = torch.arange(tokens, device=self.device) >= self.integers(lengths)[:, None]
        mask = torch.zeros(len(lengths), 1, 1, tokens, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(beyond[:, None, None], -torch.inf)

    def _table(self, span: Span) -> tuple[int, ...]:
        """The pages that hold positions below the span's end."""
        return span.pages[: -(-span.end // self.page_size)]


def _common_pages(tables: Sequence[tuple[int, ...]]) -> int:
    """How many pages all tables begin with, each keeping at least its last, which its own row is writing."""
    # What the least and the greatest of them have in common, all have.
    low, high = min(tables), max(tables)
    most = min(map(len, tables)) - 1
    return next((index for index in range(most) if low[index] != high[index]), most)
