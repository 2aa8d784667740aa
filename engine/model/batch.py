"""One step's rows as tensors: ids, positions, where keys and values go, and where attention reads.

Built once per step from a plan's spans, complete when built, used by every layer and never changed. Rows stand in the
plan's order on every stage, since hidden states travel by row number.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    pages: Pages
    """Pages of all positions below `end`."""
    end: int
    mask: torch.Tensor | None
    """[rows, end], 0 where a row may read and -inf where not; None when the span begins its sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Spans of one row each, which read together: first the pages they all begin with, then their own."""

    rows: torch.Tensor | None
    """Row numbers [B] in the batch; None when every row is one of them."""
    count: int
    shared: Pages | None
    """Pages that all rows begin with, all of them full; None when reading them once does not pay."""
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
    prefills: tuple[PrefillSpan, ...]
    decodes: DecodeRows | None
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
    def build(
        spans: Sequence[Span], page_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Batch:
        """Make the tensors of a step. `dtype` is that of the hidden states, which masks are added to."""
        ends = list(accumulate(span.count for span in spans))
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for span in spans:
            token_ids += span.token_ids
            positions += range(span.start, span.end)
            slots += (
                span.pages[position // page_size] * page_size + position % page_size
                for position in range(span.start, span.end)
            )
        single = [index for index, span in enumerate(spans) if span.count == 1]
        return Batch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            prefills=tuple(
                _prefill(span, ends[index] - span.count, page_size, device, dtype)
                for index, span in enumerate(spans)
                if span.count > 1
            ),
            decodes=_decodes(
                [spans[index] for index in single],
                [ends[index] - 1 for index in single] if len(single) < len(spans) else None,
                page_size,
                device,
                dtype,
            )
            if single
            else None,
            sample_rows=torch.tensor(
                [end - 1 for span, end in zip(spans, ends, strict=True) if span.sample is not None],
                dtype=torch.int64,
                device=device,
            ),
            samples=tuple((span.request_id, span.sample) for span in spans if span.sample is not None),
            scored=tuple(
                _scored(span, end - span.count)
                for span, end in zip(spans, ends, strict=True)
                if span.logprob_targets
            ),
        )


def _scored(span: Span, first_row: int) -> ScoredRows:
    offset = span.logprob_start - 1 - span.start  # the row before a token gives its probability
    assert 0 <= offset <= span.count - len(span.logprob_targets), (
        f"{len(span.logprob_targets)} targets from position {span.logprob_start} in rows [{span.start}, {span.end})"
    )
    return ScoredRows(
        span.request_id, first_row + offset, span.logprob_targets, span.logprob_start, span.top_logprobs
    )


def _pages(pages: Sequence[int], device: torch.device) -> Pages:
    run = page_run(pages)
    return run if run is not None else torch.tensor(pages, dtype=torch.int64, device=device)


def _prefill(
    span: Span, first_row: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> PrefillSpan:
    mask = None
    if span.start > 0:
        mask = torch.full((span.count, span.end), -torch.inf, dtype=dtype, device=device).triu_(
            span.start + 1
        )
    pages = _pages(span.pages[: -(-span.end // page_size)], device)
    return PrefillSpan(slice(first_row, first_row + span.count), pages, span.end, mask)


def _decodes(
    spans: Sequence[Span], rows: list[int] | None, page_size: int, device: torch.device, dtype: torch.dtype
) -> DecodeRows:
    tables = [span.pages[: -(-span.end // page_size)] for span in spans]
    shared = _shared_pages(tables)
    own = [table[shared:] for table in tables]
    longest = max(map(len, own))
    filled = [page for table in own for page in (*table, *(table[-1],) * (longest - len(table)))]
    tokens = longest * page_size
    lengths = [span.end - shared * page_size for span in spans]
    mask = None
    if min(lengths) < tokens:
        beyond = torch.arange(tokens, device=device) >= torch.tensor(lengths, device=device)[:, None]
        mask = torch.zeros(len(spans), 1, 1, tokens, dtype=dtype, device=device)
        mask.masked_fill_(beyond[:, None, None], -torch.inf)
    return DecodeRows(
        rows=None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device),
        count=len(spans),
        shared=_pages(tables[0][:shared], device) if shared else None,
        pages=_pages(filled, device),
        mask=mask,
    )


def _shared_pages(tables: Sequence[Sequence[int]]) -> int:
    """How many pages all tables begin with, each table keeping one page at least; 0 when they are too few to pay."""
    if len(tables) < 2:
        return 0
    first = tables[0]
    most = min(map(len, tables)) - 1
    shared = 0
    while shared < most and all(table[shared] == first[shared] for table in tables):
        shared += 1
    return shared
