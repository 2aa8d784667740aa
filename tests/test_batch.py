"""How a plan's spans become rows: where keys go, which decode rows read together, which prompt rows are scored."""

from __future__ import annotations

import pytest
import torch

from engine.model import batch
from engine.model.batch import Batch
from engine.types import Sample, SamplingParams, Span

CPU = torch.device("cpu")
PAGE = 4
SAMPLE = Sample(SamplingParams(max_new_tokens=1), 0, 0, (), (), ())


def build(*spans: Span, page_size: int = PAGE) -> Batch:
    return Batch.build(spans, page_size, CPU, torch.float32)


def decode(end: int, pages: tuple[int, ...], request_id: int = 0) -> Span:
    """One row that is the last of `end` tokens."""
    return Span(request_id, end - 1, (9,), pages, SAMPLE)


def test_rows_stand_in_plan_order():
    built = build(
        Span(0, 6, (20, 21, 22), (7, 3, 5)),
        decode(6, (1, 2)),
        Span(2, 0, (30, 31), (8,), SAMPLE),
    )
    assert built.row_count == 6
    assert built.token_ids.tolist() == [20, 21, 22, 9, 30, 31]
    assert built.positions.tolist() == [6, 7, 8, 5, 0, 1]
    assert built.slots.tolist() == [3 * 4 + 2, 3 * 4 + 3, 5 * 4, 2 * 4 + 1, 8 * 4, 8 * 4 + 1]
    assert built.sample_rows.tolist() == [3, 5] and [rid for rid, _ in built.samples] == [0, 2]
    first, second = built.prefills
    assert (first.rows, first.start, first.end) == (slice(0, 3), 6, 9) and first.pages.tolist() == [7, 3, 5]
    assert (second.rows, second.pages) == (slice(4, 6), slice(8, 9))
    (rows,) = built.decodes
    assert rows.rows.tolist() == [3]


def test_pages_beyond_a_spans_end_are_not_read():
    """A table may be longer than what is written: pages reserved for later hold other sequences' past."""
    built = build(Span(0, 0, (1, 2), (5, 6, 7)), decode(3, (8, 9, 10)))
    assert built.prefills[0].pages == slice(5, 6) and built.decodes[0].pages == slice(8, 9)


@pytest.mark.parametrize(
    ("start", "count", "begun"),
    [
        (0, 1, [21, 22, 23]),
        (1, 1, []),
        (3, 1, []),
        (0, 4, []),
        (0, 3, [23]),
        (1, 2, []),
        (1, 5, [38, 39]),
        (4, 1, [37, 38, 39]),
        (5, 2, []),
    ],
)
def test_who_begins_a_page_clears_the_rest_of_it(start, count, begun):
    """Pages 5 and 9 of 4 tokens each; whoever had page 9 before left something behind."""
    built = build(decode(8, (1, 2)), Span(1, start, (7,) * count, (5, 9)))
    assert ([] if built.begun_slots is None else built.begun_slots.tolist()) == begun


def test_rows_alone_in_their_batch_need_no_row_numbers():
    assert build(decode(5, (1, 2)), decode(3, (4,))).decodes[0].rows is None


def test_short_rows_are_filled_with_their_own_pages_and_masked():
    (rows,) = build(decode(9, (1, 5, 3)), decode(3, (7,))).decodes
    assert rows.pages.tolist() == [1, 5, 3, 7, 7, 7] and rows.shared is None
    hidden = (rows.mask == -torch.inf).view(2, 12).tolist()
    assert hidden == [[False] * 9 + [True] * 3, [False] * 3 + [True] * 9]
    assert build(decode(8, (1, 5))).decodes[0].mask is None


def test_a_common_prefix_is_read_once_when_it_pays():
    prefix = tuple(range(100, 140))
    long = [decode(41 * 16, (*prefix, 50 + number), number) for number in range(3)]
    other = decode(16, (9,), 3)
    shared, alone = build(*long[:2], other, long[2], page_size=16).decodes
    assert (
        shared.shared == slice(100, 140)
        and shared.rows.tolist() == [0, 1, 3]
        and shared.pages == slice(50, 53)
    )
    assert alone.shared is None and alone.rows.tolist() == [2]
    # Two rows spare 16 tokens: not worth a second product.
    (rows,) = build(decode(32, (7, 1)), decode(32, (7, 2)), page_size=16).decodes
    assert rows.shared is None and rows.pages.tolist() == [7, 1, 7, 2]


def test_the_page_a_row_writes_is_never_shared(monkeypatch):
    """Equal tables cannot be (each row writes its own page), but a prefix of another table can."""
    monkeypatch.setattr(batch, "_SAVED_TOKENS_MIN", 1)
    (rows,) = build(decode(12, (1, 2, 3)), decode(16, (1, 2, 3, 4))).decodes
    assert rows.shared == slice(1, 3) and rows.pages.tolist() == [3, 3, 3, 4]
    assert (rows.mask == -torch.inf).view(2, 8).sum(1).tolist() == [4, 0]


def test_a_very_long_row_does_not_fill_up_short_ones(monkeypatch):
    monkeypatch.setattr(batch, "_GROUP_TOKENS_MAX", 64)
    spans = [decode(4, (number,), number) for number in range(5)]
    spans.insert(2, decode(60, tuple(range(100, 115)), 9))
    short, long = build(*spans).decodes
    assert short.rows.tolist() == [0, 1, 3, 4, 5] and short.pages == slice(0, 5)
    assert long.rows.tolist() == [2] and long.pages == slice(100, 115)


@pytest.mark.parametrize(
    ("start", "count", "first_position", "targets", "first_row"),
    [(0, 5, 1, 4, 0), (4, 4, 5, 4, 0), (4, 4, 6, 3, 1), (0, 5, 5, 1, 4)],
)
def test_scored_rows_are_those_before_their_tokens(start, count, first_position, targets, first_row):
    span = Span(3, start, (1,) * count, (0, 1), None, tuple(range(50, 50 + targets)), first_position, 2)
    (scored,) = build(decode(2, (9,)), span).scored
    assert (scored.first_row, scored.first_position, scored.top) == (1 + first_row, first_position, 2)
    assert scored.targets == tuple(range(50, 50 + targets))


def test_targets_outside_the_span_are_a_programmers_error():
    with pytest.raises(AssertionError, match="4 targets from position 3"):
        build(Span(3, 0, (1, 2, 3, 4), (0,), None, (1, 2, 3, 4), 3, 0))
