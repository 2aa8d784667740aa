"""The last stage's end of a step: hidden states become tokens and log probabilities.

The head is applied only to rows that are asked for, in blocks, so that no [rows, vocabulary] tensor of a whole prompt
is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.batch import Batch, ScoredRows
from engine.model.decoder import Decoder
from engine.model.sampler import sample, token_logprobs
from engine.types import SpanLogprobs, TokenLogprob

_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Readout:
    """What a step gave: one token per sampling span in plan order, and the log probabilities that were asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[SpanLogprobs, ...]


def read_out(decoder: Decoder, batch: Batch, hidden: torch.Tensor) -> Readout:
    """Sample the batch's last rows and score its prompt rows. `hidden` [rows, hidden] is the last layer's output."""
    tokens: list[int] = []
    outputs: dict[int, TokenLogprob] = {}
    if batch.samples:
        logits = decoder.logits(hidden.index_select(0, batch.sample_rows))
        tokens = sample(logits, [item for _, item in batch.samples])
        wanted = [row for row, (_, item) in enumerate(batch.samples) if item.params.return_logprob]
        if wanted:
            items = [batch.samples[row] for row in wanted]
            scored = token_logprobs(
                logits[wanted],
                [tokens[row] for row in wanted],
                [item.position for _, item in items],
                [item.params.top_logprobs for _, item in items],
            )
            outputs = {request_id: entry for (request_id, _), entry in zip(items, scored, strict=True)}
    prompts = {scored.request_id: _score(decoder, scored, hidden) for scored in batch.scored}
    return Readout(
        tuple(tokens),
        tuple(
            SpanLogprobs(
                request_id=request_id, prompt=prompts.get(request_id, ()), output=outputs.get(request_id)
            )
            for request_id in dict.fromkeys((*prompts, *outputs))
        ),
    )


def _score(decoder: Decoder, scored: ScoredRows, hidden: torch.Tensor) -> tuple[TokenLogprob, ...]:
    """Log probabilities of one span's prompt tokens."""
    entries: list[TokenLogprob] = []
    for start in range(0, len(scored.targets), _BLOCK_ROWS):
        targets = scored.targets[start : start + _BLOCK_ROWS]
        first_row = scored.first_row + start
        logits = decoder.logits(hidden[first_row : first_row + len(targets)])
        first_position = scored.first_position + start
        entries += token_logprobs(
            logits, targets, range(first_position, first_position + len(targets)), [scored.top] * len(targets)
        )
    return tuple(entries)
