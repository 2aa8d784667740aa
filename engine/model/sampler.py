"""From logits to tokens and log probabilities. Pure functions of their arguments: no state, no randomness of their own.

A row's token depends on its own logits, parameters and 64 random bits, never on the other rows of the batch. Penalties
follow SGLang: frequency and presence are subtracted for generated tokens, then repetition divides positive logits and
multiplies negative ones for tokens of prompt and output, then biases are added. Truncation is joint: top_k, top_p and
min_p each look at the whole distribution after the temperature, and a token must pass all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.types import Sample, SamplingParams, TokenLogprob

_CANDIDATES = 64
"""How many of the greatest weights are sorted first; all of them only for rows that keep as many."""


def sample(logits: torch.Tensor, samples: Sequence[Sample]) -> list[int]:
    """Choose one token per row of float32 logits [rows, vocabulary], which stay as they are."""
    assert logits.shape[0] == len(samples), f"{logits.shape[0]} rows for {len(samples)} samples"
    rows = [row for row, item in enumerate(samples) if _adjusts(item)]
    if rows:
        logits = logits.clone()
        for row in rows:
            _adjust_(logits[row], samples[row])
    drawing = [row for row, item in enumerate(samples) if item.params.temperature > 0]
    if len(drawing) == len(samples):
        return _draw(logits, samples)
    tokens: list[int] = logits.argmax(-1).tolist()
    if drawing:
        drawn = _draw(logits[drawing], [samples[row] for row in drawing])
        for row, token in zip(drawing, drawn, strict=True):
            tokens[row] = token
    return tokens


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], positions: Sequence[int], top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probabilities of one token per row under the model's own distribution, with each row's `top` likeliest."""
    if not token_ids:
        return []
    totals = logits.logsumexp(-1, keepdim=True)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    found: list[float] = (logits.gather(-1, chosen) - totals)[:, 0].tolist()
    alternatives: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if most := min(max(top), logits.shape[-1]):
        best = logits.topk(most, -1)
        values, ids = (best.values - totals).tolist(), best.indices.tolist()
        for row, count in enumerate(top):
            pairs = sorted(zip(ids[row], values[row], strict=True), key=lambda pair: (-pair[1], pair[0]))
            alternatives[row] = tuple(pairs[:count])
    return [
        TokenLogprob(position=position, token_id=token_id, logprob=logprob, top=others)
        for position, token_id, logprob, others in zip(positions, token_ids, found, alternatives, strict=True)
    ]


def _adjusts(item: Sample) -> bool:
    params = item.params
    return bool(item.banned_ids or params.logit_bias) or _penalises(params)


def _penalises(params: SamplingParams) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def _adjust_(logits: torch.Tensor, item: Sample) -> None:
    """Penalties, biases and bans, in place, on one row [vocabulary]. Ids that the model does not have are no one's."""
    params, size, device = item.params, logits.shape[0], logits.device
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(item.output_ids)
        seen = torch.tensor(list(counts), dtype=torch.int64, device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits[seen] -= params.frequency_penalty * times + params.presence_penalty
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list({*item.prompt_ids, *item.output_ids}), dtype=torch.int64, device=device)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    biases = [pair for pair in params.logit_bias if 0 <= pair[0] < size]
    if biases:
        ids = torch.tensor([token_id for token_id, _ in biases], dtype=torch.int64, device=device)
        added = torch.tensor([bias for _, bias in biases], dtype=logits.dtype, device=device)
        logits.index_add_(0, ids, added)
    banned = [token_id for token_id in item.banned_ids if 0 <= token_id < size]
    if banned:
        logits[banned] = -torch.inf


def _draw(logits: torch.Tensor, samples: Sequence[Sample]) -> list[int]:
    """Inverse of the cumulative distribution, in the order of ids, at each row's random number."""
    temperatures = torch.tensor([item.params.temperature for item in samples], dtype=torch.float32)
    # Against the greatest logit first, so that no temperature, however small, makes an infinity but a -inf.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures.to(logits.device)[:, None]
    tokens = []
    for weights, item in zip(scaled.exp_().cpu(), samples, strict=True):
        kept = _kept_ids(weights.numpy(), item.params) if _truncates(item.params) else None
        if kept is not None:
            weights = weights[kept]
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        # The bits' upper 53 make a number in [0, 1) exactly.
        target = cumulative[-1] * ((item.random >> 11) * 2.0**-53)
        index = min(int(torch.searchsorted(cumulative, target, right=True)), len(weights) - 1)
        tokens.append(index if kept is None else int(kept[index]))
    return tokens


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _kept_ids(weights: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.int64]:
    """Ids that pass all limits, ascending. Among equal weights at the limit the lowest ids stay."""
    size = len(weights)
    greatest = np.sort(
        np.partition(weights, size - _CANDIDATES)[-_CANDIDATES:] if size > _CANDIDATES else weights
    )
    kept = _kept_count(greatest[::-1], weights, params)
    if kept == len(greatest) < size:
        greatest = np.sort(weights)
        kept = _kept_count(greatest[::-1], weights, params)
    limit = greatest[-kept]
    above = np.flatnonzero(weights > limit)
    equal = np.flatnonzero(weights == limit)[: kept - len(above)]
    ids = np.sort(np.concatenate((above, equal)))
    return (
        ids if len(ids) else np.zeros(1, dtype=np.int64)
    )  # no id compares with weights that are not numbers


def _kept_count(
    descending: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], params: SamplingParams
) -> int:
    """How many of the greatest weights pass: each limit keeps a first part of them, and at least one stays."""
    kept = min(params.top_k, len(descending)) if params.top_k > 0 else len(descending)
    if params.top_p < 1.0:
        before = descending.astype(np.float64).cumsum() - descending
        kept = min(kept, int(np.count_nonzero(before < params.top_p * weights.sum(dtype=np.float64))))
    if params.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(descending >= params.min_p * descending[0])))
    return max(kept, 1)
